"""Who may import whom, and which cores are free of heavy packages. Imports inside functions count."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "pdserve",
    "kernels",
    "kvtransfer",
    "engine",
    "model",
    "prefill_worker",
    "decode_worker",
    "worker",
    "router",
    "deploy",
    "simulation",
    "bench",
    "drills",
}
PROOFS = {"simulation", "bench", "drills"}  # what the product does without
ALLOWED = {
    "pdserve": set(),
    "kernels": {"pdserve"},
    "kvtransfer": {"pdserve"},
    "engine": {"pdserve"},
    "model": {"engine", "kernels", "pdserve"},
    "prefill_worker": {"engine", "kvtransfer", "pdserve"},
    "decode_worker": {"engine", "kvtransfer", "pdserve"},
    "worker": {"prefill_worker", "decode_worker", "model", "engine", "kvtransfer", "kernels", "pdserve"},
    "router": {"pdserve"},
    "deploy": PACKAGES - PROOFS,
    "simulation": PACKAGES - {"deploy", "drills"},
    "bench": PACKAGES - {"deploy", "drills"},
    "drills": PACKAGES,
}
COMMAND_LINE = ROOT / "deploy" / "commands"  # imports the proofs when one of their commands is called
HEAVY = {"torch", "zmq", "triton", "ray", "transformers"}
NOT_IN = {
    "router": HEAVY,
    "pdserve": HEAVY,
    "engine": HEAVY,
    "prefill_worker": HEAVY,
    "decode_worker": HEAVY,
    "kvtransfer": HEAVY - {"zmq", "torch"},
}

PURE_CORES = [
    "engine.engine",
    "engine.executor",
    "engine.scheduler",
    "kvtransfer.frames",
    "kvtransfer.credit",
    "kvtransfer.ranges",
    "kvtransfer.sender",
    "kvtransfer.receiver",
    "kvtransfer.exchange",
    "prefill_worker.role",
    "decode_worker.role",
    "worker.control",
    "worker.session",
    "router.membership",
    "router.policies",
    "router.control",
    "router.session",
    "router.dispatch",
    "router.in_flight",
    "router.validation",
    "router.generation",
    "pdserve.types",
    "pdserve.config",
    "pdserve.kv_format",
    "pdserve.client.resume",
]
NOT_IN_CORES = HEAVY | {"grpc"}


def imported(path):
    """The top-level packages a file imports anywhere, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide who imports whom"
            yield node.module.split(".")[0], node.lineno


def files(package):
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_follow_the_table(package):
    forbidden = (PACKAGES - ALLOWED[package] - {package}) | NOT_IN.get(package, set())
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for name, line in imported(path)
        if name in forbidden and not (name in PROOFS and COMMAND_LINE in path.parents)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("package", "file"), [("zmq", "zmq.py"), ("torch", "distributed.py")])
def test_heavy_package_is_imported_only_by_its_transport(package, file):
    users = {path.name for path in files("kvtransfer") for name, _ in imported(path) if name == package}
    assert users == {file}


@pytest.mark.parametrize("module", PURE_CORES)
def test_pure_cores_import_without_heavy_packages(module):
    code = (
        f"import sys, {module}\n"
        f"found = sorted(set(sys.modules) & {NOT_IN_CORES!r})\n"
        f"sys.exit(f'{module} pulls in ' + ', '.join(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
