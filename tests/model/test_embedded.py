"""Unpacking a GGUF file: what is in the directory, and that any number of processes get the same complete one."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from model import embedded
from model.config import ModelConfig, RopeConfig
from model.embedded import embedded_model_directory
from model.unpack import unpack_gguf
from pdserve.errors import ConfigError
from support.checkpoints import TinyShape, write_tiny_checkpoint

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "Ġ", "ab", "Ġab"]
SHAPE = TinyShape(vocab_size=len(TOKENS), layers=2, hidden_size=64, intermediate_size=96)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What GGUF does to q and k: each head's rows from halves to pairs."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.stack((halves[:, 0], halves[:, 1]), axis=2).reshape(rows.shape)


def write_gguf(path: Path, checkpoint: Path, architecture: str = "llama") -> None:
    """The tied Llama `checkpoint` as a GGUF file of float32 tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SHAPE.layers)
    writer.add_context_length(SHAPE.max_position)
    writer.add_embedding_length(SHAPE.hidden_size)
    writer.add_feed_forward_length(SHAPE.intermediate_size)
    writer.add_head_count(SHAPE.heads)
    writer.add_head_count_kv(SHAPE.kv_heads)
    writer.add_rope_freq_base(SHAPE.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, SHAPE.heads if "q_proj" in name else SHAPE.kv_heads)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a tiny GGUF file, and an empty cache folder. The package must not be imported."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "llama", tied=True, shape=SHAPE)
    folder = tmp_path / "site" / embedded.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('imported')\n")
    write_gguf(folder / "tiny.gguf", checkpoint)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return folder


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.parent.iterdir() if path.name not in (directory.name, ".lock")]


def test_the_unpacked_checkpoint_is_the_packed_one(package: Path, tmp_path: Path) -> None:
    directory = embedded_model_directory()
    packed = load_file(tmp_path / "checkpoint" / "model.safetensors")
    unpacked = load_file(directory / "model.safetensors")
    assert unpacked.keys() == packed.keys()
    for name, tensor in packed.items():
        assert torch.equal(unpacked[name], tensor.to(torch.bfloat16)), name
    config = ModelConfig.from_hf(directory)
    assert (config.family, config.tied_head, config.dtype) == ("llama", True, "bfloat16")
    assert (config.rms_norm_eps, config.rope, config.eos_token_ids) == (1e-5, RopeConfig(theta=1e4), (2,))
    assert (config.heads, config.kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 1024)


def test_the_unpacked_tokenizer_merges_and_keeps_digits_and_special_tokens_apart(package: Path) -> None:
    directory = embedded_model_directory()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("ab 12<|im_end|>ab").tokens == ["ab", "Ġ", "1", "2", "<|im_end|>", "ab"]
    assert tokenizer.encode(" ab").tokens == ["Ġab"]
    assert tokenizer.decode([1, 8, 9, 2]) == "ab ab"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["chat_template"] == "{{ messages }}"


def test_a_second_call_needs_neither_package_nor_time(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    directory = embedded_model_directory(lambda done, total: heard.append((done, total)))
    assert heard[-1][0] == heard[-1][1] == len(heard) > 0
    heard.clear()
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    assert embedded_model_directory(lambda done, total: heard.append((done, total))) == directory
    assert heard == []


def test_of_callers_at_once_one_unpacks_and_all_get_its_directory(package: Path) -> None:
    start, unpackers = Barrier(4), set()

    def call(number: int) -> Path:
        start.wait(timeout=30)
        return embedded_model_directory(lambda done, total: unpackers.add(number))

    with ThreadPoolExecutor(4) as pool:
        directories = list(pool.map(call, range(4)))
    assert len(set(directories)) == 1
    assert len(unpackers) == 1
    assert leftovers(directories[0]) == []


def test_processes_at_once_print_the_same_complete_directory(package: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])}
    command = [sys.executable, "-m", "model.embedded"]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = set()
    for child in children:
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        printed.add(output.strip())
    directory = Path(printed.pop())
    assert not printed
    assert load_file(directory / "model.safetensors")
    assert leftovers(directory) == []


def test_what_a_dead_process_left_half_unpacked_is_cleared_away(package: Path, tmp_path: Path) -> None:
    half = tmp_path / "cache" / f"embedded-v{embedded.FORMAT_VERSION}" / f".{embedded.MODEL_NAME}-dead"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert leftovers(embedded_model_directory()) == []


def test_a_failure_half_way_leaves_nothing_behind(package: Path, tmp_path: Path) -> None:
    write_gguf(package / "tiny.gguf", tmp_path / "checkpoint", architecture="mamba")
    with pytest.raises(ConfigError, match="'mamba'"):
        embedded_model_directory()
    folder = tmp_path / "cache" / f"embedded-v{embedded.FORMAT_VERSION}"
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_lock_that_is_never_given_back_ends_in_an_error(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "cache" / f"embedded-v{embedded.FORMAT_VERSION}" / ".lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setattr(embedded, "_LOCK_TIMEOUT_S", 0.0)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"\.lock: another process"):
            embedded_model_directory()


def test_a_missing_package_says_what_to_run(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="no_such_package is not installed: run `make setup`"):
        embedded_model_directory()


def test_a_cache_folder_that_cannot_be_written_is_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"file/cache.*cannot unpack"):
        embedded_model_directory()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf: not a readable GGUF file"):
        unpack_gguf(tmp_path / "broken.gguf", tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert embedded.cache_directory() == Path("/xdg/pdserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert embedded.cache_directory() == Path("/home/someone/.cache/pdserve")
    monkeypatch.setenv("PDSERVE_CACHE", "/elsewhere")
    assert embedded.cache_directory() == Path("/elsewhere")


def test_a_user_without_a_home_hears_what_to_set(monkeypatch):
    """Any user id in a container; only who serves the embedded model needs one."""
    for name in ("HOME", "XDG_CACHE_HOME", "PDSERVE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def nameless(*arguments):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nameless)
    with pytest.raises(ConfigError, match=r"no home .* set PDSERVE_CACHE") as caught:
        embedded_model_directory()
    assert "\n" not in str(caught.value)
