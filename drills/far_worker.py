"""A worker without Ray, for a network namespace of its own: `python -m drills.far_worker SPEC_FILE`.

It serves until its standard input ends, and then leaves without a word.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from deploy.spec import WorkerSpec
from pdserve import logs
from pdserve.config import Config
from pdserve.types import Role
from worker.process import Worker


def write_spec(spec: WorkerSpec, file: Path) -> None:
    """`spec` as `main` reads it. It must be of a cluster without a key of its own."""
    file.write_text(json.dumps(asdict(spec) | {"config": spec.config.as_dict(), "kv_key": None}))


def read_spec(file: Path) -> WorkerSpec:
    values = json.loads(file.read_text())
    config = Config().override(values["config"], str(file))
    addresses = tuple(values["router_addresses"])
    return WorkerSpec(**values | {"role": Role(values["role"]), "router_addresses": addresses, "config": config})


def main() -> None:
    spec = read_spec(Path(sys.argv[1]))
    logs.configure(spec.config.logging.level, spec.worker_id, Path(spec.log_path))
    worker = Worker(spec)
    worker.start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
