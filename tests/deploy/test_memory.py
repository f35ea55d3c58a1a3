"""More memory asked for than there is, and cores of a quota: said, or followed, before anything starts."""

import pytest

from deploy import cluster
from deploy.cluster import LocalCluster, check_memory
from pdserve import machine
from pdserve.config import Config
from pdserve.errors import ConfigError
from pdserve.machine import Memory

MIB = 2**20


@pytest.fixture
def checkpoint(small_checkpoint):
    """Its directory and the MiB of its weights."""
    return small_checkpoint, (small_checkpoint / "model.safetensors").stat().st_size // MIB


def config(**engine):
    return Config().override({"cluster": {"prefill": 1, "decode": 2}, "engine": engine}, "test")


def test_what_fits_is_exactly_what_is_said(checkpoint):
    directory, weights_mb = checkpoint
    left = Memory((3 * (100 + weights_mb) + 2) * MIB, "this machine")
    check_memory(config(kv_cache_mb=100), directory, left)
    with pytest.raises(ConfigError, match=r"engine.kv_cache_mb = 101: .* at most 100 would fit") as caught:
        check_memory(config(kv_cache_mb=101), directory, left)
    assert "\n" not in str(caught.value)
    assert "for each of 3 workers" in str(caught.value)


@pytest.mark.parametrize("asked", [10**9, 10**18])
def test_absurd_sizes(checkpoint, asked):
    with pytest.raises(ConfigError, match=f"engine.kv_cache_mb = {asked}: .* the control group's limit leaves 4096"):
        check_memory(config(kv_cache_mb=asked), checkpoint[0], Memory(4096 * MIB, "the control group's limit"))


def test_not_even_the_weights(checkpoint):
    with pytest.raises(ConfigError, match="not even the weights fit: start fewer workers"):
        check_memory(config(kv_cache_mb=1), checkpoint[0], Memory(MIB, "this machine"))


def test_a_machine_that_does_not_say(checkpoint):
    check_memory(config(kv_cache_mb=10**9), checkpoint[0], None)


def test_it_is_said_before_anything_starts(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "RuntimeDirectory", None)
    sections = {"model": {"path": str(checkpoint[0])}, "engine": {"kv_cache_mb": 10**9}, "router": {"grpc_port": 0}}
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_mb = 1000000000"):
        LocalCluster(Config().override(sections, "test"))


@pytest.mark.parametrize(("cores", "threads"), [(12, 4), (3, 1), (2, 1)])
def test_the_default_of_threads_follows_the_quota(monkeypatch, cores, threads):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert cluster._resolve_threads(config()).engine.threads == threads
