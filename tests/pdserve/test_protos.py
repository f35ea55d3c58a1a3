"""The generated stubs in the tree are those of the .proto files beside them."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_stubs_are_up_to_date(tmp_path):
    protos = ["pdserve/rpc/inference.proto", "pdserve/rpc/cluster.proto"]
    for proto in protos:
        target = tmp_path / "in" / proto
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / proto, target)
    out = tmp_path / "out"
    out.mkdir()
    flags = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(tmp_path / "in"), *flags, *protos]
    subprocess.run(command, check=True, timeout=60)
    generated = sorted(path.relative_to(out) for path in out.rglob("*.py*"))
    assert len(generated) == 6
    stale = [str(path) for path in generated if (out / path).read_bytes() != (ROOT / path).read_bytes()]
    assert not stale, f"run `make protos`: {stale}"
