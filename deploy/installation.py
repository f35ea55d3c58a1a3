"""What was imported is the product, here and in the processes that are started.

The packages have plain names (`model`, `kernels`). A folder of the user's that has such a name must not be taken for
one of them: Python looks into the working directory first, and Ray hands the driver's on to its workers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "bench",
    "decode_worker",
    "deploy",
    "drills",
    "engine",
    "kernels",
    "kvtransfer",
    "model",
    "pdserve",
    "prefill_worker",
    "router",
    "simulation",
    "worker",
)


def foreign_module() -> str | None:
    """A line about the first package that would be, or was, imported from somewhere else; None if all is well."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
        if not places or os.path.realpath(places[0]) != str(ROOT / name):
            found = f"would be imported from {places[0]}" if places else "is not found"
            return (
                f"{name!r}, a package of pdserve in {ROOT}, {found}: take that out of Python's path (PYTHONPATH, the "
                "working directory of `python -m`), or rename it"
            )
    return None


def child_environment() -> Mapping[str, str]:
    """For Python processes that are started: their working directory is not looked into, the product is."""
    variables = {"PYTHONSAFEPATH": "1"}
    if (ROOT / "pyproject.toml").exists():  # a source tree, which need not be installed
        parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [part for part in parts if part and part != str(ROOT)]
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *others])
    return variables
