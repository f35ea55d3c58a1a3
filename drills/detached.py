"""A whole cluster under test, in a process of its own: `python -m drills.detached CONFIG_FILE SABOTAGE`.

As `pdserve up`, but that its processes get a sabotage (JSON). It runs until it is told to end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.cli import run_cluster
from deploy.termination import exit_on_signals
from drills.sabotage import Sabotage
from pdserve.config import load_config


def main() -> None:
    exit_on_signals()
    run_cluster(load_config(Path(sys.argv[1])), json_output=True, under_test=Sabotage(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
