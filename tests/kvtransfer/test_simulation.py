"""Whole transfers under a seeded network and a virtual clock: right bytes, or a typed error, within the deadline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvtransfer.frames import Open
from kvtransfer.integrity import hash_tokens
from kvtransfer.layout import KVLayout
from kvtransfer.receiver import Expectation
from pdserve.config import TransferConfig
from pdserve.errors import Cancelled, InternalError, PdserveError, TransferError
from pdserve.types import SampledToken, Ticket
from support.kv_simulation import NetworkFaults, SimulatedWorker, Simulation
from support.kv_store import FakeStore

LAYOUT = KVLayout(layer_count=3, kv_heads=1, head_dim=8, dtype="bfloat16")  # 32 bytes a token and layer
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
    received: list[Sequence[SampledToken] | PdserveError] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)

    def on_sent(self, outcome: PdserveError | None) -> None:
        self.sent.append(outcome)
        self.ended_at.append(self.simulation.clock.now())
        self.source.close()

    def on_received(self, outcome: Sequence[SampledToken] | PdserveError) -> None:
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
    )
    token_ids = list(range(TOKEN_COUNT))
    expected = Expectation(run.transfer, 1, LAYOUT, b"model", hash_tokens(token_ids), 0, TOKEN_COUNT)

    def need_blocks() -> None:
        delay_s = rng.choice((0.0, 0.01, 3.0))
        simulation.call_soon(delay_s, lambda: run.receiver.exchange.blocks_leased(run.transfer, run.target))

    run.receiver.exchange.expect(expected, need_blocks, run.on_received)
    offer = Open(run.transfer, 1, LAYOUT, b"model", hash_tokens(token_ids), 0, TOKEN_COUNT, rng.choice((1, 8, 32)), 300)
    ticket = Ticket(run.transfer, 1, run.receiver.transport.endpoint, 0, CONFIG.ticket_ttl_ms)
    run.sender.exchange.open_outgoing(offer, ticket, run.source, run.on_sent, queued=rng.random() < 0.5)
    schedule_prefill(run, rng)
    return run


def abort(run: Run, aborter: str) -> None:
    error = Cancelled("the client went away")
    if aborter == "prefill":
        run.sender.exchange.abort_outgoing(run.transfer, error)
    else:
        run.receiver.exchange.abort_incoming(run.transfer, error)


def schedule_prefill(run: Run, rng: random.Random) -> None:
    """Chunks of random sizes, layer by layer, then the sampled token."""
    exchange, time_s, start = run.sender.exchange, rng.choice((0.0, 8.0)), 0
    while start < TOKEN_COUNT:
        stop = min(TOKEN_COUNT, start + rng.choice((1, 7, 16, 31, 32, 33, 70)))
        for layer in range(LAYOUT.layer_count):
            time_s += rng.choice((0.0, 0.001, 0.1))
            run.simulation.call_at(time_s, partial(exchange.layer_ready, run.transfer, layer, start, stop))
        start = stop
    run.simulation.call_at(time_s, lambda: exchange.commit(run.transfer, TOKENS))


@pytest.mark.parametrize("block", range(4))
def test_calm_network_delivers_without_resending(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        run = start(seed, CALM)
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, f"seed {seed}: {run.received}"
        assert run.sender.stats.frames_resent == 0


@pytest.mark.parametrize("block", range(8))
def test_lost_doubled_late_and_damaged_frames_are_repaired(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        run = start(seed, ROUGH)
        run.simulation.run(until_s=100.0)
        run.check()
        assert run.delivered, f"seed {seed}: {run.received} {run.sent}"


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_death_of_one_side_at_any_moment_ends_the_other_within_the_ttl(victim: str) -> None:
    for seed in range(40):
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


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
def test_abort_at_any_moment_ends_both_sides_once(aborter: str) -> None:
    for seed in range(40):
        run = start(seed, ROUGH)
        run.simulation.call_at(run.simulation.rng.uniform(0.0, 3.0), partial(abort, run, aborter))
        run.simulation.run(until_s=100.0)
        run.check()


def test_link_that_damages_every_payload_gives_up_with_a_typed_error() -> None:
    run = start(1, NetworkFaults(corrupt=1.0))
    run.simulation.run(until_s=100.0)
    run.check()
    assert isinstance(run.received[0], TransferError)
