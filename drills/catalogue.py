"""The drills there are, in the order in which `all` holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drills import control, nodes, partition, storms, wire, workers
from drills.arena import Arena
from drills.stage import Stage
from drills.verdict import Rules
from pdserve.errors import ConfigError

_AIMED = frozenset({workers.BEFORE, workers.DURING, workers.AFTER})  # found by traces, which a user's cluster hides


@dataclass(frozen=True, slots=True)
class Drill:
    """The rest says what cluster it needs: `changes` of its settings; `faulty_wire`: a KV wire on which faults can be
    switched on; `detached`: a process of its own; `second_node`: workers on another Ray node too; `far_worker`:
    one behind a link of its own; `reads_logs`: it cannot do without the routers' logs. `rights` says what is missing on
    this host to hold it, or None."""

    name: str
    about: str
    hold: Callable[[Stage], None]
    rules: Rules
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    faulty_wire: bool = False
    detached: bool = False
    second_node: bool = False
    far_worker: bool = False
    rights: Callable[[], str | None] = lambda: None
    reads_logs: bool = False

    @property
    def needs_own(self) -> bool:
        """Whether it can only be held on a cluster that is made for it."""
        special = self.faulty_wire or self.detached or self.second_node or self.far_worker or self.reads_logs
        return special or bool(self.changes)

    @property
    def key(self) -> str:
        """Equal for drills that can share a cluster."""
        return repr((self.changes, self.faulty_wire, self.detached, self.second_node, self.far_worker))

    def rules_on(self, arena: Arena) -> Rules:
        """Without traces, no phase of a transfer can be aimed at."""
        if arena.has_traces:
            return self.rules
        return replace(self.rules, phases=tuple(phase for phase in self.rules.phases if phase not in _AIMED))

    def obstacle(self, arena: Arena) -> str | None:
        """Why it cannot be held here; None if it can."""
        if not arena.is_here():
            return "the cluster's processes are not on this host"
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
        "SIGSTOP a decode worker before, during and after a transfer, and in mid-decode, and let it go on later",
        workers.freeze_decode,
        Rules(phases=(workers.BEFORE, workers.DURING, workers.AFTER, workers.MID_DECODE)),
    ),
    Drill(
        "freeze-prefill",
        "SIGSTOP a prefill worker before, during and after its transfer, and let it go on later",
        workers.freeze_prefill,
        Rules(phases=(workers.BEFORE, workers.DURING, workers.AFTER)),
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
    Drill(
        "kill-router",
        "SIGKILL a router in mid-decode and before a first token: its clients go on at another one",
        control.kill_router,
        Rules(phases=(workers.MID_DECODE, control.BEFORE_TOKENS)),
    ),
    Drill(
        "drain",
        "Tell workers to leave, by the drain call and by SIGTERM: they finish what they have",
        control.drain,
        Rules(failover=False, phases=(control.DRAINED, control.TERMINATED)),
    ),
    Drill(
        "cancel-storm",
        "Cancel most of many requests, in any state",
        storms.cancel_storm,
        Rules(failover=False),
    ),
    Drill(
        "restart-storm",
        "SIGKILL one worker after the other while requests keep coming",
        storms.restart_storm,
        Rules(phases=(storms.UNDER_LOAD,)),
    ),
    Drill(
        "poison",
        "A request that crashes whoever serves it: given up after three, then refused for a while",
        storms.poison,
        Rules(phases=storms.CRASHES),
        changes={"cluster": {"routers": 1}},  # which remembers whom it suspects; others do not
        reads_logs=True,
    ),
    Drill(
        "mixed",
        "Any fault every few seconds, for --duration seconds",
        storms.mixed,
        Rules(phases=(storms.UNDER_LOAD,)),
    ),
    Drill(
        "cut-link",
        "Cut the KV link of a sender in mid-transfer, for longer than its ticket lives",
        wire.cut_link,
        Rules(phases=(workers.DURING,)),
        faulty_wire=True,
    ),
    Drill(
        "slow-link",
        "Delay half of the KV wire's frames: later ones overtake them",
        wire.slow_link,
        Rules(failover=False, phases=(workers.DURING,)),
        faulty_wire=True,
    ),
    Drill(
        "corrupt-frames",
        "Flip a bit in every eighth message on the KV wire",
        wire.corrupt_frames,
        Rules(failover=False, phases=(workers.DURING,)),
        faulty_wire=True,
    ),
    Drill(
        "drop-frames",
        "Lose and double messages on the KV wire, the closing ones among them",
        wire.drop_frames,
        Rules(failover=False, phases=(workers.DURING,)),
        faulty_wire=True,
    ),
    Drill(
        "overload",
        "Many more requests than the routers take",
        storms.overload,
        Rules(failover=False, refusals=True),
        changes={"router": {"max_requests": 4}},
    ),
    Drill(
        "kill-node",
        "SIGKILL everything on a second Ray node in mid-decode",
        nodes.kill_node,
        Rules(phases=(workers.MID_DECODE,)),
        changes={"cluster": {"prefill": 1, "decode": 1}},
        second_node=True,
    ),
    Drill(
        "partition",
        "Cut a decode worker's network link in mid-decode, and mend it later",
        partition.partition,
        Rules(phases=(workers.MID_DECODE,)),
        changes={"cluster": {"decode": 1}, "router": {"host": partition.NEAR_ADDRESS}},
        far_worker=True,
        rights=partition.obstacle,
    ),
    Drill(
        "kill-gcs",
        "SIGKILL Ray's control store: streams go on, and so do requests that come afterwards",
        control.kill_control_store,
        Rules(failover=False, phases=(workers.MID_DECODE,)),
        detached=True,
    ),
)


def find(name: str) -> list[Drill]:
    """The drill of this name, or all of them. Raises ConfigError naming those there are."""
    chosen = [drill for drill in DRILLS if name in ("all", drill.name)]
    if not chosen:
        raise ConfigError(f"no drill {name!r}; there are: {', '.join(drill.name for drill in DRILLS)}")
    return chosen
