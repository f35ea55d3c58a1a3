"""python -m simulation --seed N [--log] [--kind KIND] | --seeds N [--first N] [--kind KIND]"""

from __future__ import annotations

import argparse
import sys

from simulation.runner import run, simulate
from simulation.wire import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Simulate whole clusters.")
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--log", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--seeds", type=int, default=500, help="without --seed: how many to run")
    parser.add_argument("--first", type=int, default=0, help="without --seed: the first one")
    parser.add_argument("--kind", choices=sorted(KINDS), default="", help="try the KV wire alone, in this way")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = simulate(arguments.seed, log=arguments.log, kind=arguments.kind)
        print("\n".join([*outcome.log, str(outcome)]))
        return outcome.problem is not None
    report = run(range(arguments.first, arguments.first + arguments.seeds), arguments.kind)
    print(report)
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
