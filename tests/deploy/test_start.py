"""A cluster that cannot start says so and leaves nothing behind."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from deploy.cluster import LocalCluster
from pdserve.config import Config
from pdserve.errors import Unavailable

pytestmark = pytest.mark.cluster

WHEN_GRPC_COMES = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print("fork support:", os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
sys.meta_path.insert(0, Watch())
"""


def run_python(code):
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["deploy.cli", "deploy.cluster", "deploy.demo", "deploy.commands.failover_bench"])
def test_grpcs_fork_handlers_are_off_before_grpc_is_imported(module):
    """With them on, a child that Ray forks crashes now and then before its exec, and Ray does not start."""
    assert run_python(f"{WHEN_GRPC_COMES}\nimport {module}").stdout == "fork support: 0\n"


def test_importing_grpc_before_deploy_is_warned_of():
    assert "RuntimeWarning: grpc was imported before deploy" in run_python("import grpc, deploy").stderr
    assert run_python("import deploy, grpc, deploy.cluster").stderr == ""


def test_ray_that_does_not_come_up_is_a_plain_error(monkeypatch, small_checkpoint):
    def too_slow(_temp_dir, **options):
        logs = Path(_temp_dir) / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text(
            "[2026-01-01 I 1 1] (raylet) fine\n[2026-01-01 E 1 1] (raylet) no port is free\n"
        )
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", too_slow)
    with tempfile.TemporaryDirectory(prefix="pds-", dir="/tmp") as folder:
        sections = {
            "cluster": {"runtime_dir": f"{folder}/run"},
            "model": {"path": str(small_checkpoint)},
            "router": {"grpc_port": 0},
        }
        with pytest.raises(Unavailable, match="Ray did not start: The current node timed out") as caught:
            LocalCluster(Config().override(sections, "test"))
        assert "raylet.out: [2026-01-01 E 1 1] (raylet) no port is free" in str(caught.value)
        assert "gcs_server, the first of Ray's processes, ended before it could log a line" in str(caught.value)
        assert "fine" not in str(caught.value)
        assert list(Path(folder).iterdir()) == []
