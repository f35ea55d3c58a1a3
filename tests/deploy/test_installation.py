"""What the environment cannot put between the product's processes: other modules, proxies, another Ray's settings."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.installation import PACKAGES, ROOT, child_environment, foreign_module
from deploy.processes import CLUSTER_ID
from deploy.ray_environment import starting_ray


def in_folder(folder, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_list_of_packages_is_whole():
    found = {each.parent.name for each in ROOT.glob("*/__init__.py")} - {"tests"}
    assert found == set(PACKAGES)
    assert foreign_module() is None


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("kind", ["module", "package", "folder"])
def test_a_module_in_the_way_is_named(tmp_path, name, kind):
    """As a module, a package, or a mere folder."""
    if kind == "module":
        (tmp_path / f"{name}.py").write_text("raise SystemExit('foreign')")
    else:
        (tmp_path / name).mkdir()
    if kind == "package":
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('foreign')")
    with pytest.MonkeyPatch.context() as patch:
        others = [
            each for each in sys.path if (each and not Path(each).is_relative_to(ROOT)) or "site-packages" in each
        ]
        patch.setattr(sys, "path", [str(tmp_path), *others])
        patch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        line = foreign_module()
    assert line is not None
    assert "\n" not in line
    assert f"{name!r}" in line
    assert str(tmp_path / name) in line


def test_the_command_says_so_in_one_line(tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('foreign')")
    done = in_folder(tmp_path, "-m", "deploy", "status")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "model.py") in done.stderr


def test_a_program_of_the_users_that_starts_a_cluster_hears_it_too(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "serve.py").write_text("from deploy.cluster import LocalCluster")
    done = in_folder(tmp_path, "serve.py")
    assert done.returncode == 1
    assert "ImportError: 'kernels', a package of pdserve" in done.stderr


def test_processes_that_are_started_see_the_product_and_not_their_working_directory(tmp_path):
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('foreign')")
    code = "import deploy.own_modules; print('ours')"
    for path in ("", ".", str(tmp_path), f":{tmp_path}"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            done = in_folder(tmp_path, "-c", code, **child_environment())
        assert done.stdout == "ours\n", done.stderr


def test_what_rays_processes_inherit(tmp_path, monkeypatch):
    """Other clusters' settings stay behind, and this process is as it was."""
    monkeypatch.chdir(tmp_path)
    others = {
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_TMPDIR": "/nowhere",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    (tmp_path / "own").mkdir()
    with starting_ray("some-id", tmp_path / "own"):
        inherited, place = dict(os.environ), os.getcwd()
        os.environ["RAY_SET_BY_RAY"] = "1"
    assert (dict(os.environ), os.getcwd()) == (before, str(tmp_path))
    assert place == str(tmp_path / "own")
    assert inherited[CLUSTER_ID] == "some-id"
    assert inherited["PYTHONSAFEPATH"] == "1"
    assert inherited["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "its ports would be open to other hosts"
    assert len(inherited["RAY_AUTH_TOKEN"]) >= 32
    assert not {"RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE"} & set(inherited)


def test_a_working_directory_that_has_been_deleted(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with starting_ray("some-id", tmp_path):
        assert os.getcwd() == str(tmp_path)
    with pytest.raises(FileNotFoundError):
        os.getcwd()
    os.chdir(tmp_path)


def channels():
    """Every place in the product where a gRPC channel is made: module and the name of its options."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                if name in ("insecure_channel", "secure_channel"):
                    options = {each.arg: each.value for each in node.keywords}.get("options")
                    yield path.relative_to(ROOT), node.lineno, getattr(options, "id", None)


def test_every_channel_is_direct():
    """A proxy of the environment's cuts off whatever channel does not say that it wants none."""
    found = list(channels())
    assert len(found) >= 4
    for path, line, options in found:
        assert options, f"{path}:{line}: a channel without options"
        module = importlib.import_module(".".join(Path(path).with_suffix("").parts))
        assert ("grpc.enable_http_proxy", 0) in getattr(module, options), f"{path}:{line}"
