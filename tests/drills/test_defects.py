"""Drills fail where they must: each intentional defect is found, and the verdict says what it did to the clients."""

import pickle
from dataclasses import replace

import pytest

from drills.catalogue import find
from drills.defects import DEFECTS
from drills.far_worker import read_spec, write_spec
from drills.run import OwnClusters, hold
from drills.sabotage import Sabotage
from drills.stage import References
from drills.verdict import Status
from engine.engine import Engine
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import ManualClock
from pdserve.config import Config
from pdserve.errors import ConfigError
from pdserve.types import Role
from router.dispatch import Dispatch
from support.clusters import cluster_config
from support.drills import SMALL, Quiet
from worker.control import Control
from worker.spec import WorkerSpec

# Streams that a defect leaves without an end are waited for until then.
IMPATIENT = replace(SMALL, request_timeout_s=10.0)
CASES = [
    ("fence", "kill-router", ("lost", "repeated", "changed")),  # as both attempts' tokens happen to mix
    ("free-early", "cancel-storm", ("changed",)),
    ("repeat-token", "lose-all-decode", ("repeated",)),
    ("drop-terminal", "lose-all-decode", ("without_terminal",)),
]

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("defect", "name", "figures"), CASES, ids=[case[0] for case in CASES])
def test_a_defect_is_found(small_checkpoint, defect, name, figures):
    (drill,) = find(name)
    config = cluster_config("", small_checkpoint, prefill=1, decode=2, routers=2)
    with OwnClusters(config, Quiet(), defect) as clusters:
        verdict = hold(drill, clusters, IMPATIENT, References(), Quiet()).verdict
    assert verdict.status is Status.FAIL
    assert any(getattr(verdict, figure) for figure in figures), verdict.reasons
    assert verdict.leaked_blocks == 0


def test_every_defect_has_its_case():
    assert {defect for defect, _, _ in CASES} == set(DEFECTS)


def test_without_a_sabotage_nothing_is_replaced():
    before = (Dispatch.on_tokens, Dispatch._end, Dispatch._current, Control._send, Engine._deliver)
    transport = MemoryNetwork().transport()
    assert Sabotage().transport(transport, ManualClock()) is transport
    Sabotage().before_start()
    assert (Dispatch.on_tokens, Dispatch._end, Dispatch._current, Control._send, Engine._deliver) == before


def test_an_unknown_defect_is_an_error():
    with pytest.raises(ConfigError, match="fence, free-early, repeat-token, drop-terminal"):
        Sabotage("everything")


def test_a_sabotage_reaches_a_process_whichever_way_it_is_started(tmp_path):
    sabotage = Sabotage("fence", str(tmp_path / "faults.json"))
    assert pickle.loads(pickle.dumps(sabotage)) == sabotage
    spec = WorkerSpec(
        worker_id="decode-0",
        role=Role.DECODE,
        model_directory="/model",
        model_name="small",
        router_addresses=("127.0.0.1:1",),
        kv_socket_directory="/kv",
        log_path="/log",
        config=Config(),
        under_test=sabotage,
    )
    write_spec(spec, sabotage, tmp_path / "spec.json")
    assert read_spec(tmp_path / "spec.json") == spec
