"""One cluster for all tests that can share it: process starts are what costs here."""

import tempfile
from pathlib import Path

import psutil
import pytest

from deploy.cluster import LocalCluster
from deploy.processes import processes_of
from deploy.runtime import RuntimeDirectory
from pdserve.client import Client
from support.clusters import cluster_config, wait_quiet

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="session")
def shared_cluster(small_checkpoint):
    """Two routers, two prefill and two decode workers. Afterwards nothing of it may be left."""
    runtime_dir = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
    before = set(psutil.Process().children(recursive=True))
    with LocalCluster(cluster_config(runtime_dir, small_checkpoint, prefill=2, decode=2, routers=2)) as cluster:
        cluster_id = RuntimeDirectory(str(runtime_dir)).cluster_id
        assert cluster_id
        yield cluster
    assert set(psutil.Process().children(recursive=True)) <= before, "processes are left"
    assert not processes_of(cluster_id)
    runtime_dir.rmdir()  # it was there before, and is empty again


@pytest.fixture
def cluster(shared_cluster):
    """The shared cluster, quiet before the test and after it."""
    wait_quiet(shared_cluster)
    yield shared_cluster
    wait_quiet(shared_cluster)


@pytest.fixture
def client(cluster):
    """A client of the first router only."""
    with Client(cluster.grpc_address) as client:
        yield client
