"""The drills' list, and where each can be held."""

import json

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from drills.catalogue import DRILLS, find
from drills.load import Scale, background, cancelled, probe
from drills.run import hold
from drills.stage import References
from drills.verdict import Status, Wish
from pdserve.errors import ConfigError
from support.drills import SMALL, Quiet


class Elsewhere:
    """Somebody's cluster that shows neither traces nor logs."""

    own = False

    def arena(self, drill):
        return self

    has_traces = False

    def is_here(self):
        return True


def test_every_drill_is_listed_with_what_it_does():
    listed = json.loads(CliRunner().invoke(app, ["drill", "list", "--json"]).output)["drills"]
    assert [each["name"] for each in listed] == [drill.name for drill in DRILLS]
    assert all(each["about"] for each in listed)
    assert len({drill.name for drill in DRILLS}) == len(DRILLS) >= 20


def test_an_unknown_drill_names_those_there_are():
    with pytest.raises(ConfigError, match="kill-decode, kill-prefill"):
        find("kill-everything")


@pytest.mark.parametrize("name", ["kill-prefill", "poison", "corrupt-frames", "kill-gcs", "kill-node", "overload"])
def test_a_drill_that_a_users_cluster_does_not_allow_is_skipped_with_a_reason(name):
    (drill,) = find(name)
    verdict = hold(drill, Elsewhere(), SMALL, References(), Quiet()).verdict
    assert verdict.status is Status.SKIPPED
    assert verdict.reasons[0]


def test_on_a_users_cluster_only_the_phases_it_shows_must_be_hit():
    (drill,) = find("kill-decode")
    assert drill.obstacle(Elsewhere()) is None
    assert drill.rules_on(Elsewhere()).phases == ("mid-decode",)


def test_a_seed_makes_the_same_load_and_another_seed_another():
    scale = Scale()
    assert background(3, 10, scale) == background(3, 10, scale) != background(4, 10, scale)
    assert probe(3, "x", scale) == probe(3, "x", scale) != probe(3, "y", scale)


def test_a_load_has_every_kind_of_request():
    asks = background(0, 10, Scale())
    options = [ask.options for ask in asks]
    assert {ask.name.split("-")[0] for ask in asks} == {"greedy", "sampled", "stop", "several", "penalties"}
    assert any(each.get("stop") for each in options)
    assert any(each.get("n") == 2 for each in options)
    assert all("seed" in each for each in options if each["temperature"])
    assert len({len(ask.prompt.split()) for ask in asks}) >= 4


def test_a_share_of_a_cancel_storm_goes_away_at_once_and_a_share_later():
    asks = cancelled(background(0, 40, Scale()), 0, 0.6)
    gone = [ask for ask in asks if ask.wish is Wish.CANCELLED]
    assert 15 < len(gone) < 33
    assert any(ask.cancel_after == 0 for ask in gone)
    assert any(ask.cancel_after > 0 for ask in gone)
