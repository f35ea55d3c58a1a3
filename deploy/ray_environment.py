"""What Ray and gRPC read from the environment when they start. Import this module before `ray`; it does the rest."""

from __future__ import annotations

import os

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
    # A fork here is followed by an exec. gRPC's handlers round it only get in the way, in Ray's child processes too.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}

for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)
