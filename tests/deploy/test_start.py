"""A cluster that cannot start says so and leaves nothing behind."""

import tempfile
from pathlib import Path

import pytest
import ray

from deploy.cluster import LocalCluster
from pdserve.config import Config
from pdserve.errors import Unavailable


def test_ray_that_does_not_come_up_is_a_plain_error(monkeypatch, small_checkpoint):
    def too_slow(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", too_slow)
    with tempfile.TemporaryDirectory(prefix="pds-", dir="/tmp") as folder:
        sections = {
            "cluster": {"runtime_dir": f"{folder}/run"},
            "model": {"path": str(small_checkpoint)},
            "router": {"grpc_port": 0},
        }
        with pytest.raises(Unavailable, match="Ray did not start: The current node timed out"):
            LocalCluster(Config().override(sections, "test"))
        assert list(Path(folder).iterdir()) == []
