"""What Ray and gRPC read from the environment when they are imported. Importing any part of `deploy` sets it first."""

from __future__ import annotations

import os
import sys
import warnings

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

for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)
