"""The drills there are, in the order in which `all` holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.drills import workers
from deploy.drills.arena import Arena
from deploy.drills.stage import Stage
from deploy.drills.verdict import Rules
from pdserve.errors import ConfigError

_AIMED = frozenset({workers.BEFORE, workers.DURING, workers.AFTER})  # found by traces, which a user's cluster hides


@dataclass(frozen=True, slots=True)
class Drill:
    """`changes`: settings of the cluster it needs; `environment`: of its processes; `detached`: a cluster that runs in
    a process of its own. `needs_own`: it can only be held on a cluster of its own."""

    name: str
    about: str
    hold: Callable[[Stage], None]
    rules: Rules
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    detached: bool = False
    needs_own: bool = False

    def rules_on(self, arena: Arena) -> Rules:
        """Without traces, no phase of a transfer can be aimed at."""
        if arena.has_traces:
            return self.rules
        return replace(self.rules, phases=tuple(phase for phase in self.rules.phases if phase not in _AIMED))

    def obstacle(self, arena: Arena) -> str | None:
        """Why it cannot be held here; None if it can."""
        if self.rules.phases and not self.rules_on(arena).phases:
            return "it aims at phases of a transfer, which only a cluster of its own shows"
        return None


DRILLS: tuple[Drill, ...] = (
    Drill(
        "kill-decode",
        "SIGKILL a decode worker before, during and after a transfer, and in mid-decode",
        workers.kill_decode,
        Rules(phases=(workers.BEFORE, workers.DURING, workers.AFTER, workers.MID_DECODE)),
    ),
    Drill(
        "kill-prefill",
        "SIGKILL a prefill worker before, during and after its transfer",
        workers.kill_prefill,
        Rules(phases=(workers.BEFORE, workers.DURING, workers.AFTER)),
    ),
    Drill(
        "freeze-decode",
        "SIGSTOP a decode worker in mid-decode, and let it go on later",
        workers.freeze_decode,
        Rules(phases=(workers.MID_DECODE,)),
    ),
    Drill(
        "freeze-prefill",
        "SIGSTOP a prefill worker during its transfer, and let it go on later",
        workers.freeze_prefill,
        Rules(phases=(workers.DURING,)),
    ),
    Drill(
        "lose-all-prefill",
        "SIGKILL every prefill worker during a transfer: decode computes the rest",
        workers.lose_all_prefill,
        Rules(phases=(workers.DURING,)),
    ),
    Drill(
        "lose-all-decode",
        "SIGKILL every decode worker in mid-decode: prefill takes both roles",
        workers.lose_all_decode,
        Rules(phases=(workers.MID_DECODE,)),
    ),
)


def find(name: str) -> list[Drill]:
    """The drill of this name, or all of them. Raises ConfigError naming those there are."""
    chosen = [drill for drill in DRILLS if name in ("all", drill.name)]
    if not chosen:
        raise ConfigError(f"no drill {name!r}; there are: {', '.join(drill.name for drill in DRILLS)}")
    return chosen
