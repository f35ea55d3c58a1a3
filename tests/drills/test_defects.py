"""Drills fail where they must: each intentional defect is found, and the verdict says what it did to the clients."""

import os

import pytest

from drills.catalogue import find
from drills.defects import DEFECTS, VARIABLE, break_router, break_worker
from drills.run import OwnClusters, hold
from drills.stage import References
from drills.verdict import Status
from pdserve.errors import ConfigError
from router.dispatch import Dispatch
from support.clusters import cluster_config
from support.drills import SMALL, Quiet

CASES = [
    ("fence", "kill-router", ("lost", "repeated", "changed")),  # as both attempts' tokens happen to mix
    ("free-early", "cancel-storm", ("changed",)),
    ("repeat-token", "lose-all-decode", ("repeated",)),
    ("drop-terminal", "lose-all-decode", ("without_terminal",)),
]


@pytest.mark.cluster
@pytest.mark.parametrize(("defect", "name", "figures"), CASES, ids=[case[0] for case in CASES])
def test_a_defect_is_found(small_checkpoint, defect, name, figures):
    (drill,) = find(name)
    config = cluster_config("", small_checkpoint, prefill=1, decode=2, routers=2)
    with OwnClusters(config, Quiet(), {VARIABLE: defect}) as clusters:
        verdict = hold(drill, clusters, SMALL, References(), Quiet()).verdict
    assert verdict.status is Status.FAIL
    assert any(getattr(verdict, figure) for figure in figures), verdict.reasons
    assert verdict.leaked_blocks == 0
    assert VARIABLE not in os.environ


def test_every_defect_has_its_case():
    assert {defect for defect, _, _ in CASES} == set(DEFECTS)


def test_without_the_variable_nothing_is_replaced(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = (Dispatch.on_tokens, Dispatch._end, Dispatch._current)
    break_router()
    break_worker()
    assert (Dispatch.on_tokens, Dispatch._end, Dispatch._current) == before


def test_an_unknown_defect_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "everything")
    with pytest.raises(ConfigError, match="fence, free-early, repeat-token, drop-terminal"):
        break_router()
