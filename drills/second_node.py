"""A second Ray node on this host, as a process of its own: `python -m drills.second_node GCS_ADDRESS PLACES`.

It runs until it is killed, and says "ready" when the node has joined. The `ray start` command will not do: it binds to
an address that other hosts can reach, and this cluster is on loopback alone.
"""

from __future__ import annotations

import signal
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams

PLACES = "pdserve-second"  # the custom resource that only this node has
_STORE_BYTES = 80 * 1024 * 1024


def main() -> None:
    gcs_address, places = sys.argv[1], int(sys.argv[2])
    parameters = RayParams(
        gcs_address=gcs_address,
        redis_address=gcs_address,
        node_ip_address="127.0.0.1",
        num_cpus=0,
        num_gpus=0,
        resources={PLACES: places},
        object_store_memory=_STORE_BYTES,
        include_log_monitor=False,
    )
    node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
    print("ready", node.unique_id, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
