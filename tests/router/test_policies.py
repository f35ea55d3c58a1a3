"""Where attempts are placed: each case is a snapshot, a wish and the one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.types import Role
from router.policies import Candidate, LeastLoaded, Placement, PlacementWish


def worker(name: str, **fields: Any) -> Candidate:
    """A prefill worker if its name begins with p, else a decode worker."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return replace(Candidate(name, name, role, "same", 0, 0, 10), **fields)


def place(*candidates: Candidate, **wish: Any) -> Placement | None:
    return LeastLoaded().place(PlacementWish(**wish), list(candidates))


PAIR = (worker("p0"), worker("d0"))


@pytest.mark.parametrize(
    ("candidates", "wish", "placement"),
    [
        (PAIR, {}, Placement("d0", "p0")),
        ((), {}, None),
        ((worker("d0", draining=True),), {}, None),
        # Local: there is nobody to send, or but one that failed it, or it shall be alone.
        ((worker("d0"),), {}, Placement("d0")),
        (PAIR, {"avoid": frozenset({"p0"})}, Placement("d0")),
        (PAIR, {"alone": True}, Placement("d0")),
        ((worker("p0", draining=True), worker("d0")), {}, Placement("d0")),
        # Without a decode worker, a prefill worker does both alone, whoever else could send.
        ((worker("p0", assigned_requests=1), worker("p1")), {}, Placement("p1")),
        # Beside another output: the oldest that is there, willing and has not failed it.
        ((*PAIR, worker("d1")), {"beside": ("d1", "d0")}, Placement("d1", shares=True)),
        ((*PAIR, worker("d1")), {"beside": ("gone", "d1")}, Placement("d1", shares=True)),
        ((*PAIR, worker("d1")), {"beside": ("d1",), "avoid": frozenset({"d1"})}, Placement("d0", "p0")),
        ((*PAIR, worker("d1", draining=True)), {"beside": ("d1",)}, Placement("d0", "p0")),
        ((*PAIR, worker("d1")), {"beside": ("d1",), "alone": True}, Placement("d0")),
        # A sender for whoever decodes already, even if that one takes nothing new.
        (PAIR, {"decode": "d9"}, Placement("d9", "p0")),
        (PAIR, {"decode": "d0", "alone": True}, Placement("d0")),
        (PAIR, {"decode": "d0", "avoid": frozenset({"p0"})}, Placement("d0")),
        ((), {"decode": "d0"}, Placement("d0")),
    ],
)
def test_a_snapshot_and_a_wish_have_one_placement(
    candidates: tuple[Candidate, ...], wish: dict[str, Any], placement: Placement | None
) -> None:
    assert place(*candidates, **wish) == placement


# From what weighs most to what weighs least; each beats all that come after it together.
_DECODE = (
    {"fingerprint": "other"},
    {"tripped": True},
    {"isolating": True},
    {"assigned_requests": 1},
    {"free_blocks": 9},
)
_SEND = (*_DECODE[:3], {"assigned_prompt_tokens": 1}, *_DECODE[3:])


@pytest.mark.parametrize("index", range(len(_DECODE)))
def test_what_speaks_against_a_decode_worker_is_weighed_in_order(index: int) -> None:
    lesser = {name: value for fields in _DECODE[index + 1 :] for name, value in fields.items()}
    placement = place(worker("d0", **_DECODE[index]), worker("d1", **lesser), output_fingerprint="same")
    assert placement == Placement("d1")


@pytest.mark.parametrize("index", range(len(_SEND)))
def test_what_speaks_against_a_sender_is_weighed_in_order(index: int) -> None:
    lesser = {name: value for fields in _SEND[index + 1 :] for name, value in fields.items()}
    candidates = worker("p0", **_SEND[index]), worker("p1", **lesser)
    assert place(*candidates, decode="d0", prompt_fingerprint="same") == Placement("d0", "p1")


def test_who_failed_it_before_decodes_only_where_there_is_nobody_else() -> None:
    avoid = frozenset({"d0"})
    assert place(worker("d0"), worker("d1", tripped=True, fingerprint="other"), avoid=avoid) == Placement("d1")
    assert place(worker("d0"), avoid=avoid) == Placement("d0")


def test_equal_workers_are_taken_by_their_ids() -> None:
    assert place(worker("d1"), worker("d0"), worker("p1"), worker("p0")) == Placement("d0", "p0")
