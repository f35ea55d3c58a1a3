"""A worker without Ray, for a network namespace of its own: `python -m drills.far_worker SPEC_FILE`.

It serves until its standard input ends, and then leaves without a word.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from drills.sabotage import Sabotage
from pdserve import logs
from pdserve.config import Config
from pdserve.types import Role
from worker.process import Worker
from worker.spec import WorkerSpec


def write_spec(spec: WorkerSpec, sabotage: Sabotage, file: Path) -> None:
    """`spec` as `main` reads it. It must be of a cluster without a key of its own, and with this sabotage."""
    plain = replace(spec, under_test=None)
    file.write_text(
        json.dumps(asdict(plain) | {"config": spec.config.as_dict(), "kv_key": None, "under_test": asdict(sabotage)})
    )


def read_spec(file: Path) -> WorkerSpec:
    values = json.loads(file.read_text())
    config = Config().override(values["config"], str(file))
    addresses = tuple(values["router_addresses"])
    rebuilt = {
        "role": Role(values["role"]),
        "router_addresses": addresses,
        "config": config,
        "under_test": Sabotage(**values["under_test"]),
    }
    return WorkerSpec(**values | rebuilt)


def main() -> None:
    spec = read_spec(Path(sys.argv[1]))
    logs.configure(spec.config.logging.level, spec.worker_id, Path(spec.log_path))
    assert spec.under_test is not None
    spec.under_test.before_start()
    worker = Worker(spec)
    worker.start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
