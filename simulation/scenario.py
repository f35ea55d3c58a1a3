"""What one seed stands for: a cluster's shape and settings, its clients, and the faults that will happen to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.config import TRANSFER_MODES, EngineConfig, RouterConfig, TransferConfig
from pdserve.types import Role, SamplingParams
from simulation.client import JobPlan
from simulation.executor import TOKEN_BYTES
from simulation.network import Conditions, Death
from simulation.oracle import FIRST_TOKEN, OFTEN_SAID
from simulation.worker import WorkerPlan

_CALM_SHARE = 0.15
_MIXED_SHARE = 0.25
_POISON_SHARE = 0.1
_FIRST_BUSY_S = 0.5  # by then everybody has joined


class FaultKind(StrEnum):
    CRASH = "crash"  # a process dies, and starts again later
    FREEZE = "freeze"  # a process stops, and goes on later
    CUT = "cut"  # the connections between two hosts are reset
    PART = "part"  # nothing passes between two hosts for a while
    SLOW = "slow"  # everything between two hosts takes long for a while
    ERROR = "error"  # a worker's next step raises
    DRAIN = "drain"  # a worker takes nothing new for a while
    LEAVE = "leave"  # a process is told to end, ends once it is done, and starts again later


_OF_THE_NETWORK = (FaultKind.PART, FaultKind.SLOW)
_OF_ANYBODY = (FaultKind.CRASH, FaultKind.FREEZE, FaultKind.LEAVE)  # those that also strike routers


@dataclass(frozen=True, slots=True)
class Fault:
    """Happens right before the busy event with this number. `other` is the second host where it takes two."""

    at_event: int
    kind: FaultKind
    host: str
    other: str
    duration_s: float
    death: Death
    patience_s: float = 0.3  # how long one that leaves waits for what it has
    again_after_s: float = 0.0  # a freeze comes once more, so long after its end


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of it. `calm`: nothing happens but what everybody can bear, so nobody may notice anything either."""

    seed: int
    calm: bool
    routers: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    conditions: Conditions
    engine: EngineConfig
    transfer: TransferConfig
    router: RouterConfig
    jobs: tuple[JobPlan, ...]
    late_jobs: tuple[JobPlan, ...]  # begin when all faults are over, and must succeed
    faults: tuple[Fault, ...]

    @property
    def sound_wire(self) -> bool:
        """Whether everything that is sent on the KV wire arrives, once, whole and in order."""
        wire = self.conditions
        harm = wire.lost or wire.doubled or wire.damaged or wire.late or wire.delay_s[0] < wire.delay_s[1]
        return not harm and not any(fault.kind in _OF_THE_NETWORK for fault in self.faults)


def draw(seed: int, calm: bool | None = None) -> Scenario:
    """The scenario of a seed. `calm`: choose that much of it."""
    rng, more = random.Random(seed), random.Random(f"more {seed}")
    drawn_calm = rng.random() < _CALM_SHARE
    calm = drawn_calm if calm is None else calm
    block_tokens = rng.choice((2, 4, 8))
    longest = rng.choice((24, 48, 72))
    workers = _coloured(more, _workers(rng, block_tokens, longest, calm))
    routers = tuple(f"router-{i}" for i in range(rng.choice((1, 1, 2))))
    job_count = 8 if calm else rng.randint(3, 8)
    engine = EngineConfig(
        block_tokens=block_tokens,
        max_step_tokens=rng.choice((4, 8, 32)),
        max_running=rng.choice((2, 4, 8)),
        max_queued=64 if calm else rng.choice((3, 64, 64)),
    )
    max_requests = 64 if calm else rng.choice((4, 64, 64))
    jobs = [_varied(more, _job(rng, f"r{i}", longest, calm), most_outputs=3) for i in range(job_count)]
    if not calm and more.random() < _POISON_SHARE:
        jobs.append(_poisonous(more, longest))
    faults = _faults(rng, [worker.worker_id for worker in workers], routers, job_count)
    mixed = len({worker.colour for worker in workers}) > 1
    if more.random() < (0.8 if mixed else 0.1):
        loss = _router_loss(more, routers, job_count)
        faults += _with_a_worker(random.Random(f"loss {seed}"), loss, workers, job_count) if mixed else [loss]
    roomy = min(engine.max_queued, max_requests) >= 64  # where there is little room, the late ones must fit
    late = [_varied(more, _job(rng, f"late{i}", longest, True), 3 if roomy else 1) for i in range(2)]
    return Scenario(
        seed=seed,
        calm=calm,
        routers=routers,
        workers=workers,
        conditions=Conditions() if calm else _conditions(rng, more),
        engine=engine,
        transfer=_transfer(rng, calm),
        router=RouterConfig(
            max_attempts=rng.choice((5, 8)),
            placement_timeout_ms=4_000,
            ticket_timeout_ms=2_000,
            renew_interval_ms=400,
            worker_timeout_ms=1_500,
            max_recoveries=rng.choice((1, 4)),
            breaker_cooldown_ms=500,
            poison_refusal_ms=2_000,
            max_requests=max_requests,
        ),
        jobs=tuple(jobs),
        late_jobs=tuple(late),
        faults=() if calm else tuple(sorted(faults, key=lambda fault: fault.at_event)),
    )


def _workers(rng: random.Random, block_tokens: int, longest: int, calm: bool) -> tuple[WorkerPlan, ...]:
    """Pools from "just one of the longest" to "all of them"."""

    def plan(role: Role, index: int) -> WorkerPlan:
        blocks = -(-longest // block_tokens) + 1
        slow = rng.random() < (0.5 if calm else 0.15)
        return WorkerPlan(
            worker_id=f"{role.value}-{index}",
            role=role,
            block_count=round(blocks * rng.choice((1.0, 1.3, 2.0, 5.0))),
            step_s=(0.02, 0.06) if slow else (0.002, 0.008),
        )

    prefill = [plan(Role.PREFILL, i) for i in range(rng.choice((1, 1, 2, 3)))]
    decode = [plan(Role.DECODE, i) for i in range(rng.choice((1, 2, 2, 3)))]
    return (*prefill, *decode)


def _coloured(more: random.Random, workers: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """Now and then workers are of two kinds: the pools run on different hardware, or it is anyhow."""
    if more.random() > _MIXED_SHARE:
        return workers
    if more.random() < 0.3:
        return tuple(replace(worker, colour=int(worker.role is Role.DECODE)) for worker in workers)
    return tuple(replace(worker, colour=more.randrange(2)) for worker in workers)


def _transfer(rng: random.Random, calm: bool) -> TransferConfig:
    """Where nothing fails, tickets are short: they must live by being renewed."""
    frame_bytes = TOKEN_BYTES * rng.choice((3, 8, 64))
    return TransferConfig(
        window_bytes=frame_bytes * rng.choice((1, 2, 8)),
        max_frame_bytes=frame_bytes,
        ticket_ttl_ms=200 if calm else 600,
        ping_interval_ms=50 if calm else 100,
        deadline_ms=600_000,  # so long that a deadlock shows
        max_renewals=rng.choice((0, 1, 2)),
        renewal_failures=2,
        renewal_cooldown_ms=500,
        connection_idle_ms=5_000,
        mode=rng.choice(("layerwise", *TRANSFER_MODES)),
    )


def _conditions(rng: random.Random, more: random.Random) -> Conditions:
    bad = rng.random() < 0.6
    return Conditions(
        delay_s=rng.choice(((0.0002, 0.001), (0.001, 0.01))),
        lost=rng.choice((0.0, 0.02, 0.1)) if bad else 0.0,
        doubled=rng.choice((0.0, 0.1)) if bad else 0.0,
        damaged=rng.choice((0.0, 0.03)) if bad else 0.0,
        late=rng.choice((0.0, 0.1)) if bad else 0.0,
        late_s=rng.choice((0.02, 0.2, 1.0)),
        max_unsent=more.choice((10_000, 10)),
    )


def _job(rng: random.Random, request_id: str, longest: int, patient: bool) -> JobPlan:
    prompt_count = rng.choice((rng.randint(1, longest - 1), rng.randint(1, longest // 4)))
    max_tokens = min(rng.choice((1, 2, rng.randint(1, 40), 40)), longest - prompt_count)
    leaves = not patient and rng.random() < 0.25
    return JobPlan(
        request_id=request_id,
        submit_s=_FIRST_BUSY_S + rng.choice((0.0, rng.uniform(0.0, 0.6))),
        prompt_count=prompt_count,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=rng.random() < 0.5),
        stop_at=rng.randrange(max_tokens) if rng.random() < 0.2 else None,
        text_stop_at=rng.randint(1, max_tokens) if rng.random() < 0.15 else None,
        leaves_after_s=rng.choice((0.0, rng.uniform(0.0, 0.3), 1.0)) if leaves else None,
        returns_after_s=rng.choice((0.0, 0.005, 0.2)) if leaves and rng.random() < 0.5 else None,
    )


def _varied(more: random.Random, plan: JobPlan, most_outputs: int) -> JobPlan:
    """The same request, now and then for several outputs, with another sampling, or from a client that reads slowly."""
    n = more.randint(2, most_outputs) if most_outputs > 1 and more.random() < 0.15 else 1
    params = _sampling(more, plan.params) if n > 1 or more.random() < 0.3 else plan.params
    pace_s = more.choice((0.0, more.uniform(0.005, 0.1))) if more.random() < 0.2 else 0.0
    return replace(plan, n=n, params=params, pace_s=pace_s)


def _sampling(more: random.Random, params: SamplingParams) -> SamplingParams:
    """Something of everything that depends on the border between prompt and output, or on what was said before."""
    tokens = more.sample(range(FIRST_TOKEN, FIRST_TOKEN + OFTEN_SAID), 2)
    return replace(
        params,
        temperature=more.choice((0.0, 0.7, 1.5)),
        top_p=more.choice((1.0, 0.9)),
        top_k=more.choice((0, 0, 20)),
        min_p=more.choice((0.0, 0.0, 0.05)),
        presence_penalty=more.choice((0.0, more.uniform(-2.0, 2.0))),
        frequency_penalty=more.choice((0.0, more.uniform(-2.0, 2.0))),
        repetition_penalty=more.choice((1.0, more.uniform(0.5, 2.0))),
        logit_bias=tuple((token, more.uniform(-5.0, 5.0)) for token in sorted(tokens)) if more.random() < 0.3 else (),
        seed=more.getrandbits(64),
        min_tokens=more.choice((0, more.randint(0, params.max_tokens))),
        logprobs=more.choice((None, 0, 2)),
    )


def _poisonous(more: random.Random, longest: int) -> JobPlan:
    """A request that crashes who computes its prompt's end, or one of its first tokens."""
    prompt_count = more.randint(2, longest - 8)
    return JobPlan(
        request_id="poison",
        submit_s=_FIRST_BUSY_S + more.uniform(0.0, 0.5),
        prompt_count=prompt_count,
        params=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        poison_at=prompt_count - 1 + more.choice((0, 0, 1, 3)),
    )


def _router_loss(more: random.Random, routers: tuple[str, ...], job_count: int) -> Fault:
    """A router ends amid its streams: what it knew of them has to be known to the next one."""
    return Fault(
        at_event=more.randrange(20 * job_count),
        kind=more.choice((FaultKind.CRASH, FaultKind.LEAVE)),
        host=more.choice(routers),
        other="",
        duration_s=0.3,
        death=Death.CLEAN,
        patience_s=0.05,
    )


def _with_a_worker(
    rng: random.Random, loss: Fault, workers: tuple[WorkerPlan, ...], job_count: int
) -> tuple[Fault, Fault]:
    """A router and a worker end at once: what that one computed is computed again, perhaps by one of another kind, and
    the next router knows only from the client that there was another one."""
    at_event = rng.randrange(5 * job_count, 40 * job_count)
    host = rng.choice(workers).worker_id
    crash = Fault(at_event, FaultKind.CRASH, host, "", rng.choice((1.0, 3.0)), rng.choice(tuple(Death)))
    return replace(loss, at_event=at_event), crash


def _faults(rng: random.Random, workers: list[str], routers: tuple[str, ...], job_count: int) -> list[Fault]:
    """A few at any events, sometimes several at once."""
    faults: list[Fault] = []
    span = 40 * job_count
    while len(faults) < 1 or rng.random() < 0.7:
        kind = rng.choice((FaultKind.CRASH, FaultKind.CRASH, FaultKind.FREEZE, *FaultKind))
        host = rng.choice((*workers, *workers, *routers)) if kind in _OF_ANYBODY else ""
        if not host:
            host = rng.choice(workers)
        others = [other for other in (*workers, *routers) if other != host]
        if kind is FaultKind.CUT:
            host, others = rng.choice(routers), [*workers, "client"]
        at_event = faults[-1].at_event if faults and rng.random() < 0.15 else rng.randrange(span)
        faults.append(
            Fault(
                at_event=at_event,
                kind=kind,
                host=host,
                other=rng.choice(others),
                duration_s=rng.choice((0.02, 0.3, 1.0, rng.uniform(0.0, 3.0))),
                death=rng.choice(tuple(Death)),
                patience_s=rng.choice((0.05, 0.5, 5.0)),
            )
        )
    return faults
