"""The pdserve command, as a user runs it: each call a process of its own."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from deploy.runtime import RuntimeDirectory
from support.checkpoints import edit_config
from support.clusters import wait_for

pytestmark = pytest.mark.cluster

PDSERVE = [sys.executable, "-m", "deploy"]


def pdserve(*arguments, timeout=120):
    return subprocess.run([*PDSERVE, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


def still_running(processes):
    """Those that are more than a zombie which nobody has waited for."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def runtime_dir():
    path = Path(tempfile.mkdtemp(prefix="pdc-", dir="/tmp"))
    yield path
    if any(path.iterdir()):  # else nothing was started, or nothing is left of it
        pdserve("down", "--runtime-dir", path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def config_file(tmp_path, small_checkpoint):
    path = tmp_path / "pdserve.toml"
    path.write_text(f"[model]\npath = '{small_checkpoint}'\n[engine]\nkv_cache_mb = 32\n[router]\ngrpc_port = 0\n")
    return path


def test_up_generate_status_down(runtime_dir, config_file):
    memory_before = shared_memory()
    here = ("--runtime-dir", runtime_dir)
    up = pdserve("up", "--detach", "--prefill", 1, "--decode", 1, "--config", config_file, "--json", *here)
    assert up.returncode == 0, up.stderr
    address = json.loads(up.stdout)["grpc"]

    again = pdserve("up", "--config", config_file, *here)
    assert (again.returncode, "runs or starts already in" in again.stderr) == (2, True)

    status = json.loads(pdserve("status", "--json", *here).stdout)
    assert status["grpc"] == address
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    for worker in status["workers"]:
        assert worker["state"] == "ready"
        assert psutil.pid_exists(worker["pid"])
        assert (worker["queue"], worker["requests"], worker["blocks"]["leased"]) == (0, 0, 0)
        assert worker["blocks"]["free"] > 0

    options = ("--max-tokens", 8, "--temperature", 0.8, "--seed", 3)
    answer = json.loads(pdserve("generate", "Hello there", "--json", *options, *here).stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "ttft_ms", "tpot_ms", "attempts", "exact"} <= set(answer)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert (answer["attempts"], answer["exact"]) == (1, True)
    plain = pdserve("generate", "Hello there", *options, "--address", address)
    assert plain.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    assert pdserve("generate", "Hello", "--chat", "--max-tokens", 2, *here).returncode == 0

    bad = pdserve("generate", "Hello", "--temperature", -1, *here)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    assert "temperature: is -1.0: must be finite and at least 0" in bad.stderr

    processes = RuntimeDirectory(str(runtime_dir)).processes()
    assert len(processes) >= 5
    assert pdserve("down", *here).returncode == 0
    assert not still_running(processes)
    assert not (runtime_dir / "cluster.json").exists()
    assert not list(runtime_dir.glob("*")), "something is left in the runtime directory"
    assert shared_memory() <= memory_before

    nothing = pdserve("generate", "Hello", *here)
    assert (nothing.returncode, "pdserve up" in nothing.stderr) == (1, True)


def test_down_cleans_up_after_a_supervisor_that_was_killed(runtime_dir, config_file):
    here = ("--runtime-dir", runtime_dir)
    up = pdserve("up", "--detach", "--prefill", 0, "--decode", 1, "--config", config_file, "--json", *here)
    assert up.returncode == 0, up.stderr
    runtime = RuntimeDirectory(str(runtime_dir))
    processes = runtime.processes()
    supervisor = runtime.supervisor()
    supervisor.send_signal(signal.SIGKILL)
    wait_for(lambda: not supervisor.is_running(), "its end")
    assert pdserve("down", *here).returncode == 0
    assert not still_running(processes)


def one_line_and_code_two(done, *words):
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_config_with_an_unknown_key(tmp_path, runtime_dir):
    path = tmp_path / "bad.toml"
    path.write_text("[engine]\nthread = 2\n")
    done = pdserve("up", "--config", path, "--runtime-dir", runtime_dir)
    one_line_and_code_two(done, "engine.thread", "did you mean 'threads'")


def test_an_unknown_transfer_mode(runtime_dir):
    done = pdserve("up", "--transfer", "blockwise", "--runtime-dir", runtime_dir)
    one_line_and_code_two(done, "transfer.mode", "layerwise, chunkwise, whole")


def test_a_model_directory_with_a_missing_shard(tmp_path, runtime_dir, small_checkpoint):
    from support.checkpoints import write_tiny_checkpoint

    model = write_tiny_checkpoint(tmp_path / "sharded", "llama", shards=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_checkpoint / name, model)
    (model / "model-00002-of-00003.safetensors").unlink()
    done = pdserve("up", "--model", model, "--port", 0, "--runtime-dir", runtime_dir)
    one_line_and_code_two(done, "model-00002-of-00003.safetensors")


def test_an_unsupported_architecture(tmp_path, runtime_dir, small_checkpoint):
    model = tmp_path / "model"
    shutil.copytree(small_checkpoint, model)
    edit_config(model, architectures=["MambaForCausalLM"])
    done = pdserve("up", "--model", model, "--runtime-dir", runtime_dir)
    one_line_and_code_two(done, "MambaForCausalLM", "LlamaForCausalLM")


def test_a_model_directory_that_is_not_there(runtime_dir):
    done = pdserve("up", "--model", "/no/such/model", "--runtime-dir", runtime_dir)
    one_line_and_code_two(done, "/no/such/model")


def test_a_port_that_is_taken(runtime_dir, config_file):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = pdserve("up", "--config", config_file, "--port", port, "--runtime-dir", runtime_dir)
    assert done.returncode == 2
    assert str(port) in done.stderr
