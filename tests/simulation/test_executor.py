"""The simulation's executor under a real engine: right streams, and a Violation for whatever touches wrong KV."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from engine.engine import Engine
from engine.events import Ended, EngineEvent, Leased, Preempted, Tokens
from engine.sequence import KVSource, Sequence, SequenceKV
from pdserve.config import EngineConfig
from pdserve.errors import Cancelled, InternalError
from pdserve.types import Load, Owner, SampledToken, SamplingParams
from simulation.executor import LAYERS, TOKEN_BYTES, Poisoned, TagExecutor
from simulation.oracle import Oracle, Script, Violation

PARAMS = SamplingParams(
    temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2
)
BLOCK = 4


class Simulated:
    """An engine over tags, which listens to itself."""

    def __init__(self, block_count: int = 64, colours: tuple[int, ...] = (0,), **settings: int) -> None:
        self.oracle = Oracle(1, LAYERS, mixed=len(colours) > 1)
        self.executor = TagExecutor(self.oracle, block_count, BLOCK, lambda: None, colours[0])
        config = EngineConfig(**{"block_tokens": BLOCK, "max_step_tokens": 16, "max_running": 8, **settings})
        self.events: list[EngineEvent] = []
        limit = block_count * BLOCK
        self.engine = Engine(self.executor, config, limit, self, self.executor.pool)

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        self.events += events

    def submit(self, script: Script, **settings: object) -> Owner:
        owner = Owner("t", script.request_id, "router", 1, script.output)
        self.engine.submit(
            Sequence(owner, script.prompt_ids, (), script.params, index=script.output, **settings)  # type: ignore[arg-type]
        )
        return owner

    def finish(self) -> None:
        self.engine.step()
        while not self.engine.idle():
            assert self.engine.step()

    def tokens(self, owner: Owner) -> list[SampledToken]:
        told = [event.tokens for event in self.events if isinstance(event, Tokens) and event.owner == owner]
        return [token for tokens in told for token in tokens]

    def outcome(self, owner: Owner) -> object:
        (end,) = [event for event in self.events if isinstance(event, Ended) and event.owner == owner]
        return end.outcome

    def leased_kv(self) -> SequenceKV:
        self.engine.step()
        (leased,) = [event for event in self.events if isinstance(event, Leased)]
        return leased.kv


@pytest.fixture
def names() -> Iterator[str]:
    return (f"r{number}" for number in count())


def test_streams_are_the_oracles_also_when_shared_and_preempted(names: Iterator[str]) -> None:
    simulated = Simulated(block_count=26)
    scripts = [each for _ in range(3) for each in simulated.oracle.write(next(names), 13, PARAMS, n=2)]
    owners: list[Owner] = []
    for script in scripts:
        owners.append(simulated.submit(script, shares=owners[-1] if script.output else None))
    simulated.finish()
    for script, owner in zip(scripts, owners, strict=True):
        assert simulated.tokens(owner) == list(script.tokens)
        assert simulated.outcome(owner) == script.finish
    assert simulated.executor.pool.prompts_shared
    assert any(isinstance(event, Preempted) for event in simulated.events)
    assert not simulated.executor.store.tags.any(), "blocks that are free again are wiped"


def test_a_step_that_reads_what_is_not_its_own_is_a_violation(names: Iterator[str]) -> None:
    simulated = Simulated()
    owner = simulated.submit(simulated.oracle.write(next(names), 13, PARAMS)[0])
    simulated.engine.step()
    simulated.executor.store.wipe(simulated.executor.pool.leased_to(owner)[1:2])
    with pytest.raises(Violation, match="read KV that is not its own"):
        simulated.engine.step()


def test_a_fork_without_its_copy_is_a_violation(names: Iterator[str], monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated()
    first, second = simulated.oracle.write(next(names), 14, PARAMS, n=2)
    monkeypatch.setattr(simulated.executor, "copy_block", lambda *_: None)
    simulated.submit(second, shares=simulated.submit(first))
    with pytest.raises(Violation):
        simulated.finish()


def test_a_failed_step_ends_its_sequences_and_poison_the_process(names: Iterator[str]) -> None:
    simulated = Simulated()
    owner = simulated.submit(simulated.oracle.write(next(names), 13, PARAMS)[0])
    simulated.executor.fail_next_step()
    simulated.finish()
    assert isinstance(simulated.outcome(owner), InternalError)
    (deadly,) = simulated.oracle.write(next(names), 13, PARAMS)
    simulated.oracle.poison[deadly.request_id] = 5
    simulated.submit(deadly)
    with pytest.raises(Poisoned):
        simulated.engine.step()


def test_kv_that_is_read_must_be_whole_and_leased(names: Iterator[str]) -> None:
    sending, receiving = Simulated(), Simulated()
    (script,) = receiving.oracle.write("r0", 13, PARAMS)
    sending.oracle.write("r0", 13, PARAMS)
    outlet = Outlet()
    sender = sending.submit(script, outlet=outlet, stops_after_prefill=True)
    sending.engine.step()
    assert outlet.ready == [(layer, 0, 13) for layer in range(LAYERS)]
    receiver = receiving.submit(script, source=KVSource.DELIVERED)
    kv = receiving.leased_kv()
    assert outlet.kv is not None
    for layer in range(LAYERS):
        payload = memoryview(bytearray(13 * TOKEN_BYTES))
        outlet.kv.read_into(layer, 0, 13, payload)
        kv.write(layer, 0, 13, payload)
    receiving.engine.deliver(receiver, script.tokens[:1])
    receiving.finish()
    assert receiving.tokens(receiver) == list(script.tokens)
    with pytest.raises(Violation, match="writes block"):
        kv.write(0, 0, 1, memoryview(bytearray(TOKEN_BYTES)))
    sending.executor.store.wipe(sending.executor.pool.leased_to(sender)[:1])
    with pytest.raises(Violation, match="not whole"):
        outlet.kv.read_into(0, 0, 1, memoryview(bytearray(TOKEN_BYTES)))
    sending.engine.abort(sender, Cancelled("gone"))
    sending.engine.unpin(sender)
    sending.engine.step()
    with pytest.raises(Violation, match="reads block"):
        outlet.kv.read_into(0, 0, 1, memoryview(bytearray(TOKEN_BYTES)))


def test_who_computed_the_kv_before_a_token_is_noted(names: Iterator[str]) -> None:
    simulated = Simulated(colours=(1, 0))
    (script,) = simulated.oracle.write(next(names), 13, PARAMS)
    owner = simulated.submit(script)
    simulated.finish()
    first, later = simulated.oracle.provenance(owner, 0), simulated.oracle.provenance(owner, 5)
    assert first is not None
    assert later is not None
    assert (first.prompt, first.output) == ({1}, set())
    assert (later.prompt, later.output) == ({1}, {1})


class Outlet:
    def __init__(self) -> None:
        self.kv: SequenceKV | None = None
        self.ready: list[tuple[int, int, int]] = []

    def opened(self, kv: SequenceKV) -> None:
        self.kv = kv

    def layer_ready(self, layer: int, start: int, stop: int) -> None:
        self.ready.append((layer, start, stop))
