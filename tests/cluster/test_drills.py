"""Drills pass on a sound cluster: a router killed, all prefill workers killed in mid-transfer, a cancel storm."""

import contextlib

import pytest

from drills.arena import arena_of
from drills.catalogue import find
from drills.run import hold
from drills.stage import References
from drills.verdict import Status
from support.drills import SMALL, Quiet

pytestmark = pytest.mark.cluster


class Given:
    """The shared cluster, whatever the drill would like."""

    own = True

    def __init__(self, arena):
        self._arena = arena

    def arena(self, drill):
        return self._arena


@pytest.mark.parametrize("name", ["kill-router", "lose-all-prefill", "cancel-storm"])
def test_a_drill_passes_and_its_faults_hit(cluster, name):
    (drill,) = find(name)
    with contextlib.closing(arena_of(cluster)) as arena:
        outcome = hold(drill, Given(arena), SMALL, References(), Quiet())
    verdict = outcome.verdict
    assert (verdict.status, verdict.reasons) == (Status.PASS, ())
    assert all(not hits.startswith("0/") for hits in verdict.phase_hits.values())
    assert set(verdict.phase_hits) == set(drill.rules.phases)
    assert verdict.tokens > 500
    assert len(outcome.picture[0].rows) >= 4
