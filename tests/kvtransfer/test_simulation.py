"""Whole transfers under a seeded network and a virtual clock: right bytes, or a typed error, within the deadline."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from kvtransfer.actions import TakenOver
from kvtransfer.frames import Open
from kvtransfer.integrity import hash_tokens
from kvtransfer.receiver import Expectation
from pdserve.config import TransferConfig
from pdserve.errors import Cancelled, InternalError, PdserveError, TransferError
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken, Ticket
from support.kv_simulation import NetworkFaults, SimulatedWorker, Simulation
from support.kv_store import FakeStore
from support.seeds import Seeds

LAYOUT = KVFormat(layer_count=3, kv_heads=1, head_dim=8, item="bfloat16")  # 32 bytes a token and layer
CONFIG = TransferConfig(
    window_bytes=1024, max_frame_bytes=300, ticket_ttl_ms=5_000, ping_interval_ms=500, deadline_ms=60_000
)
TOKEN_COUNT = 70
TOKENS = (SampledToken(5, -0.25, ((5, -0.25), (9, -1.75))),)
CALM = NetworkFaults()
ROUGH = NetworkFaults(drop=0.1, double=0.1, corrupt=0.05, min_delay_s=0.001, max_delay_s=0.05)


@dataclass
class Run:
    """One transfer of the simulation, and how it ended on both sides."""

    simulation: Simulation
    sender: SimulatedWorker
    receiver: SimulatedWorker
    source: FakeStore
    target: FakeStore
    transfer: bytes
    sent: list[PdserveError | None] = field(default_factory=list)
    received: list[Sequence[SampledToken] | TakenOver | PdserveError] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    replaced: list[PdserveError | None] = field(default_factory=list)
    seed: int = 0
    prefill_at: float = 0.0
    offer: Open = field(init=False)

    def on_sender_lost(self, error: PdserveError) -> None:
        self.receiver.exchange.abort_incoming(self.transfer, error)

    def on_sent(self, outcome: PdserveError | None) -> None:
        self.sent.append(outcome)
        self.ended_at.append(self.simulation.clock.now())
        self.source.close()

    def on_received(self, outcome: Sequence[SampledToken] | TakenOver | PdserveError) -> None:
        self.received.append(outcome)
        self.ended_at.append(self.simulation.clock.now())
        if isinstance(outcome, PdserveError):
            self.target.close()

    def check(self) -> None:
        """What must hold however the network behaved."""
        for worker, outcomes in ((self.sender, self.sent), (self.receiver, self.received)):
            assert len(outcomes) == 1 if worker.alive else len(outcomes) <= 1  # a dead one may have ended before
        assert max(self.ended_at, default=0.0) <= CONFIG.deadline_ms / 1000 + 1
        assert self.source.late_accesses == self.target.late_accesses == 0
        assert self.simulation.network.overspent == 0
        assert self.sender.stats.internal_errors == self.receiver.stats.internal_errors == 0
        for outcome in (*self.sent, *self.received):
            assert not isinstance(outcome, InternalError)
        if self.delivered:
            assert self.received == [TOKENS]
            assert self.target.equals(self.source, 0, TOKEN_COUNT)
        if self.sent == [None]:
            assert self.delivered or not self.receiver.alive

    @property
    def delivered(self) -> bool:
        return bool(self.received) and not isinstance(self.received[0], PdserveError)


def start(seed: int, faults: NetworkFaults) -> Run:
    """A transfer whose chunks become ready, and whose blocks are leased, at times the seed decides."""
    simulation = Simulation(seed, faults, CONFIG)
    rng = simulation.rng
    run = Run(
        simulation,
        simulation.worker("prefill"),
        simulation.worker("decode"),
        FakeStore.random(LAYOUT, TOKEN_COUNT, seed),
        FakeStore(LAYOUT, TOKEN_COUNT),
        rng.randbytes(16),
        seed=seed,
    )
    token_ids = list(range(TOKEN_COUNT))
    expected = Expectation(run.transfer, 1, LAYOUT, b"model", hash_tokens(token_ids), 0, TOKEN_COUNT)

    def need_blocks() -> None:
        delay_s = rng.choice((0.0, 0.01, 3.0))
        leased = partial(run.receiver.exchange.blocks_leased, run.transfer, run.target)
        simulation.call_soon(delay_s, partial(run.receiver.command, leased))

    lost = lambda error: run.on_sender_lost(error)  # noqa: E731 - a test may set another
    run.receiver.exchange.expect(expected, need_blocks, lost, run.on_received)
    block_tokens = rng.choice((1, 8, 32))
    run.offer = Open(run.transfer, 1, LAYOUT, b"model", hash_tokens(token_ids), 0, TOKEN_COUNT, block_tokens, 300)
    ticket = Ticket(run.transfer, 1, run.receiver.transport.endpoint, 0, CONFIG.ticket_ttl_ms)
    run.sender.exchange.open_outgoing(run.offer, ticket, run.on_sent)
    start = partial(run.sender.exchange.start_outgoing, run.transfer, run.source)
    if rng.random() < 0.5:
        start()
    run.prefill_at = schedule_prefill(run, rng, run.sender, start)
    return run


def replace_sender(run: Run, replacement: SimulatedWorker) -> None:
    """Let the receiver, when it loses its sender, renew its ticket for another one, which computes the same KV."""
    rng, offer = run.simulation.rng, replace(run.offer, epoch=2)

    def start_replacement(epoch: int) -> None:
        assert epoch == 2
        ticket = Ticket(run.transfer, epoch, run.receiver.transport.endpoint, 0, CONFIG.ticket_ttl_ms)
        source = FakeStore.random(LAYOUT, TOKEN_COUNT, run.seed)
        queued = rng.random() < 0.5
        replacement.exchange.open_outgoing(offer, ticket, run.replaced.append)
        start = partial(replacement.exchange.start_outgoing, run.transfer, source)
        if not queued:
            start()
        schedule_prefill(run, rng, replacement, start, longest_s=2.0 if queued else 8.0)  # blocks may wait for it

    def lost(error: PdserveError) -> None:
        assert isinstance(error, TransferError)
        renew = partial(run.receiver.exchange.renew, run.transfer, start_replacement)
        run.simulation.call_soon(rng.choice((0.0, 0.2)), renew)

    run.on_sender_lost = lost


def abort(run: Run, aborter: str) -> None:
    error = Cancelled("the client went away")
    if aborter == "prefill":
        run.sender.exchange.abort_outgoing(run.transfer, error)
    else:
        run.receiver.exchange.abort_incoming(run.transfer, error)


def schedule_prefill(
    run: Run, rng: random.Random, worker: SimulatedWorker, begin: Callable[[], None], longest_s: float = 8.0
) -> float:
    """`begin`, then chunks of random sizes, layer by layer, then the sampled token. Returns when it begins."""
    begins_at, start = run.simulation.clock.now() + rng.choice((0.0, longest_s)), 0
    time_s = begins_at
    run.simulation.call_at(time_s, partial(worker.command, begin))
    while start < TOKEN_COUNT:
        stop = min(TOKEN_COUNT, start + rng.choice((1, 7, 16, 31, 32, 33, 70)))
        for layer in range(LAYOUT.layer_count):
            time_s += rng.choice((0.0, 0.001, 0.1))
            ready = partial(worker.exchange.layer_ready, run.transfer, layer, start, stop)
            run.simulation.call_at(time_s, partial(worker.command, ready))
        start = stop
    commit = partial(worker.exchange.commit, run.transfer, TOKENS)
    run.simulation.call_at(time_s, partial(worker.command, commit))
    return begins_at


def test_calm_network_delivers_without_resending(seeds: Seeds) -> None:
    for seed in seeds(80):
        run = start(seed, CALM)
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, run.received
        assert run.sender.stats.frames_resent == 0


def test_lost_doubled_late_and_damaged_frames_are_repaired(seeds: Seeds) -> None:
    for seed in seeds(160):
        run = start(seed, ROUGH)
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, (run.received, run.sent)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_death_of_one_side_at_any_moment_ends_the_other_within_the_ttl(victim: str, seeds: Seeds) -> None:
    for seed in seeds(40):
        run = start(seed, ROUGH)
        dead, alive = (run.sender, run.receiver) if victim == "prefill" else (run.receiver, run.sender)
        died_at = run.simulation.rng.uniform(0.0, 3.0)
        run.simulation.call_at(died_at, dead.kill)
        run.simulation.run(until_s=100.0)
        run.check()
        survivor = run.received if alive is run.receiver else run.sent
        if isinstance(survivor[0], PdserveError):
            assert isinstance(survivor[0], TransferError)
        assert run.ended_at[-1] <= died_at + CONFIG.ticket_ttl_ms / 1000 + 0.1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pauses_of_one_side_that_the_other_can_bear_cost_nothing(side: str, seeds: Seeds) -> None:
    """Also one soon after the other: between them there is time for one sign of life each."""
    longest_s = (CONFIG.ticket_ttl_ms - CONFIG.ping_interval_ms) / 1000 - 0.3
    for seed in seeds(40):
        run = start(seed, CALM)
        worker, rng = (run.sender if side == "prefill" else run.receiver), run.simulation.rng
        time_s = rng.uniform(0.0, 1.0) + rng.choice((0.0, run.prefill_at))
        for _ in range(3):
            seconds = rng.uniform(0.5 * longest_s, longest_s)
            run.simulation.call_at(time_s, partial(worker.pause, seconds))
            time_s += seconds + rng.choice((0.6, 2.0))
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, (run.received, run.sent)
        assert run.sent == [None]


def test_sender_that_pauses_longer_than_the_ttl_believes_its_socket_and_not_its_clock(seeds: Seeds) -> None:
    """Where the receiver had what it needs, it has acknowledged; else it has given up, and says so."""
    acknowledged = 0
    for seed in seeds(80):
        run = start(seed, CALM)
        begins_at = run.prefill_at + run.simulation.rng.uniform(0.0, 1.5)
        run.simulation.call_at(begins_at, partial(run.sender.pause, run.simulation.rng.uniform(5.5, 20.0)))
        run.simulation.run(until_s=100.0)
        run.check()
        (outcome,) = run.sent
        acknowledged += outcome is None
        assert (outcome is None) == run.delivered, (run.received, run.sent)
        if isinstance(outcome, TransferError):
            assert "the receiver was silent" not in outcome.message
    assert acknowledged > 10 or not seeds.all


@pytest.mark.parametrize("faults", [CALM, ROUGH], ids=["calm", "rough"])
def test_another_sender_takes_over_from_one_that_died_at_any_moment(faults: NetworkFaults, seeds: Seeds) -> None:
    replaced = saved = 0
    for seed in seeds(60):
        run = start(seed, faults)
        replacement = run.simulation.worker("prefill-2")
        replace_sender(run, replacement)
        run.simulation.call_at(run.prefill_at + run.simulation.rng.uniform(0.0, 1.5), run.sender.kill)
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, run.received
        assert run.replaced in ([], [None])
        if run.replaced:
            replaced += 1
            all_bytes = LAYOUT.layer_count * LAYOUT.payload_bytes(TOKEN_COUNT)
            saved += replacement.stats.bytes_sent < all_bytes
    if seeds.all:
        assert replaced > 10
        assert saved > 3, "what the first sender brought was never kept"


def test_taking_over_at_any_moment_claims_only_what_is_stored_right(seeds: Seeds) -> None:
    claimed = 0
    for seed in seeds(60):
        run = start(seed, ROUGH)
        moment = run.simulation.rng.choice((0.0, 3.0, 8.0)) + run.simulation.rng.uniform(0.0, 1.5)
        run.simulation.call_at(moment, partial(run.receiver.exchange.take_over, run.transfer))
        run.simulation.run(until_s=100.0)
        (outcome,) = run.received
        if isinstance(outcome, TakenOver):
            claimed += outcome.token_stop > 0
            assert run.target.equals(run.source, 0, outcome.token_stop)
            assert isinstance(run.sent[0], TransferError)
        else:
            assert outcome == TOKENS
    assert claimed > 3 or not seeds.all


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
def test_abort_at_any_moment_ends_both_sides_once(aborter: str, seeds: Seeds) -> None:
    for seed in seeds(40):
        run = start(seed, ROUGH)
        run.simulation.call_at(run.simulation.rng.uniform(0.0, 3.0), partial(abort, run, aborter))
        run.simulation.run(until_s=100.0)
        run.check()


def test_link_that_damages_every_payload_gives_up_with_a_typed_error() -> None:
    run = start(1, NetworkFaults(corrupt=1.0))
    run.simulation.run(until_s=100.0)
    run.check()
    assert isinstance(run.received[0], TransferError)
