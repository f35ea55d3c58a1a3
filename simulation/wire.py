"""Scenarios that try the KV wire: one thing goes wrong, in any way it can, and all else is well.

`draw` mixes everything with everything, and a request that went on elsewhere hides what a transfer should have borne.
Here it shows: what a transfer can bear costs nobody anything, and what it cannot bear ends it in the right way.
"""

from __future__ import annotations

import random
from dataclasses import replace

from pdserve.types import Role
from simulation.network import Conditions, Death
from simulation.scenario import Fault, FaultKind, Scenario, draw

_TTL_S = 2.0
_PROBE_S = 0.1
_SOUND = Conditions(delay_s=(0.001, 0.001))  # so nothing overtakes anything
_LOSSY = Conditions(delay_s=(0.001, 0.01), lost=0.1, doubled=0.1, damaged=0.05, late=0.2, late_s=0.05)


def still(seed: int) -> Scenario:
    """Nothing happens at all, so nothing is asked for twice."""
    return _patient(seed)


def lossy(seed: int) -> Scenario:
    """The wire loses, doubles, damages and delays whatever it likes, and repairs all of it by itself."""
    return replace(_patient(seed), conditions=_LOSSY)


def absent(seed: int) -> Scenario:
    """Workers stand still for less than a ttl, each once or twice, with time for one sign of life between: nobody is
    lost."""
    scenario, rng = _patient(seed), random.Random(f"absent {seed}")
    longest_s = _TTL_S - _PROBE_S - 0.3
    faults = [
        _freeze(rng, worker.worker_id, rng.uniform(0.5 * longest_s, longest_s), again_after_s=rng.choice((0.0, 0.3)))
        for worker in scenario.workers
        if rng.random() < 0.6
    ]
    return replace(scenario, faults=_in_order(faults))


def asleep(seed: int) -> Scenario:
    """A prefill worker stands still for longer than a ttl, and no router hears of it: its transfers go on without it.
    When it wakes up it finds in its sockets what became of them."""
    scenario, rng = _patient(seed), random.Random(f"asleep {seed}")
    faults = [_freeze(rng, _prefill(scenario, rng), rng.uniform(_TTL_S + 0.5, 3 * _TTL_S))]
    return replace(scenario, calm=False, faults=_in_order(faults), transfer=replace(scenario.transfer, max_renewals=2))


def bereft(seed: int) -> Scenario:
    """A worker dies, now and then unnoticed by all but the wire. If it was a sender, the next one sends only what is
    missing."""
    scenario, rng = _patient(seed), random.Random(f"bereft {seed}")
    anybody = rng.choice(scenario.workers).worker_id
    victim = rng.choice((anybody, _prefill(scenario, rng), _prefill(scenario, rng)))
    death = rng.choice((Death.CLEAN, Death.SILENT))
    crash = Fault(rng.randrange(10, 150), FaultKind.CRASH, victim, "", 4 * _TTL_S, death)
    return replace(scenario, calm=False, faults=(crash,), transfer=replace(scenario.transfer, max_renewals=2))


def _patient(seed: int) -> Scenario:
    """All is well, and nobody but the wire would notice so soon if it were not."""
    scenario, minute_ms = draw(seed, calm=True), 60_000
    rng = random.Random(f"patient {seed}")
    return replace(
        scenario,
        conditions=_SOUND,
        workers=tuple(replace(worker, colour=0) for worker in scenario.workers),
        transfer=replace(
            scenario.transfer,
            ticket_ttl_ms=round(1000 * _TTL_S),
            ping_interval_ms=round(1000 * _PROBE_S),
            mode=rng.choice(("layerwise", "layerwise", scenario.transfer.mode)),
        ),
        router=replace(
            scenario.router,
            worker_timeout_ms=minute_ms,
            ticket_timeout_ms=minute_ms,
            placement_timeout_ms=minute_ms,
        ),
    )


def _freeze(rng: random.Random, host: str, duration_s: float, again_after_s: float = 0.0) -> Fault:
    return Fault(
        rng.randrange(10, 300), FaultKind.FREEZE, host, "", duration_s, Death.CLEAN, again_after_s=again_after_s
    )


def _prefill(scenario: Scenario, rng: random.Random) -> str:
    return rng.choice([worker.worker_id for worker in scenario.workers if worker.role is Role.PREFILL])


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_event))


KINDS = {kind.__name__: kind for kind in (still, lossy, absent, asleep, bereft)}
