"""What Ray and gRPC read from the environment. Importing any part of `deploy` sets what they read when they are
imported; `starting_ray` holds what Ray's processes inherit, and their working directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.installation import child_environment
from deploy.processes import CLUSTER_ID

_SETTINGS = {
    # Nothing leaves this machine.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off, a node's address is 127.0.0.1, and all of Ray's ports are bound to loopback. (The name is of the platforms
    # where off is Ray's own default.)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray gives its workers a low priority. Ours have deadlines: any busy process would make them look dead.
    "RAY_worker_niceness": "0",
    # Ray prints a paragraph into the terminal for every killed worker. Here that is an event like others; it is logged.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    # Ray forks this process to start its own. While other threads call into gRPC, gRPC's fork handlers can crash the
    # child before its exec, which Ray does not notice: it waits for 30 s, then gives up. Without handlers none crashes.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}

if "grpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ:
    warnings.warn(
        "grpc was imported before deploy, with its fork handlers on: now and then Ray will not start. Import deploy "
        "first, or set GRPC_ENABLE_FORK_SUPPORT=0",
        RuntimeWarning,
        stacklevel=1,
    )

os.environ.update(_SETTINGS)

# One for all clusters that this process starts, because Ray's client in it reads it once. Ray's own way writes one into
# the user's home, which there need not be.
_TOKEN = secrets.token_hex(32)


def node_environment(cluster_id: str) -> Mapping[str, str]:
    """What another process has to be started with to join this cluster as a node of Ray's."""
    return {**_inherited(cluster_id), "RAY_AUTH_MODE": "token"}


def _inherited(cluster_id: str) -> Mapping[str, str]:
    """For Ray's processes. That tokens are asked for, Ray decides itself when it starts a cluster in this process."""
    return {
        **_SETTINGS,
        **child_environment(),
        CLUSTER_ID: cluster_id,
        "RAY_AUTH_TOKEN": _TOKEN,
        "SPT_NOENV": "1",  # Ray's processes give themselves titles: not over their environment, by which they are known
    }


@contextlib.contextmanager
def starting_ray(cluster_id: str, directory: Path) -> Iterator[None]:
    """Meanwhile this process has the environment and working directory that Ray's processes are to inherit. Settings of
    Ray's in the user's environment (an address of another cluster, a temporary directory) are not for this one."""
    before = dict(os.environ)
    here = os.open(".", os.O_PATH)  # also where it has been deleted
    try:
        for name in before:
            if name.startswith("RAY_"):
                del os.environ[name]
        os.environ.update(_inherited(cluster_id))
        os.chdir(directory)
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
