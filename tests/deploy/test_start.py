"""A cluster that cannot start says so and leaves nothing behind."""

import tempfile
from pathlib import Path

import pytest
import ray

from deploy.cluster import LocalCluster
from pdserve.config import Config
from pdserve.errors import Unavailable


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
        assert "fine" not in str(caught.value)
        assert list(Path(folder).iterdir()) == []
