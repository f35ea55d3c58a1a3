"""Loading: single files and shards, one error that names the tensor or file for everything that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import select
from model.decoder import Decoder
from model.weights import iterate_weights, weights_digest
from pdserve.errors import ConfigError
from support.checkpoints import TinyShape, edit_config, write_tiny_checkpoint
from support.steps import Chunk, step

Tensors = dict[str, torch.Tensor]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(directory, select("reference"), dtype)


def logits(decoder: Decoder) -> torch.Tensor:
    cache = decoder.kernels.make_cache(decoder.cache_shape(1, 16))
    return decoder.forward(step(Chunk([1, 2, 3], 0, [0])), cache)


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "qwen2", "qwen2")


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_load_as_one_file_does(qwen2: Path, tmp_path: Path, shards: int) -> None:
    sharded = write_tiny_checkpoint(tmp_path / "sharded", "qwen2", shards=shards)
    assert not (sharded / "model.safetensors").exists()
    assert torch.equal(logits(load(sharded)), logits(load(qwen2)))


def test_a_bfloat16_checkpoint_loads_into_either_dtype(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    exact, rounded = logits(load(tmp_path)), logits(load(tmp_path, torch.bfloat16))
    assert exact.dtype == rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.2)


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", tied=True, shape=TinyShape(vocab_size=256))
    parameters = load(tmp_path)._parameters
    assert parameters.head.weight.data_ptr() == parameters.embedding.data_ptr()


def test_a_tied_checkpoint_may_carry_its_head(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", tied=True)
    before = logits(load(tmp_path))
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(tmp_path)), before)


def test_rotary_buffers_of_old_checkpoints_are_ignored(qwen2: Path) -> None:
    edit_tensors(qwen2, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(qwen2)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors are missing.*layers\.1\.mlp\.up_proj"),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), r"missing.*layers\.0\.self_attn\.k_proj\.bias"),
        (lambda t: t.pop("lm_head.weight"), r"missing.*lm_head\.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}), r"layers\.2.*no place"),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}), r"q_norm.*no place.*qwen2"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight.*\[63\].*\[64\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), r"model\.norm.*int8"),
    ],
    ids=["missing", "missing bias", "missing head", "left over", "of another family", "wrong shape", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(qwen2: Path, edit: Callable[[Tensors], object], named: str) -> None:
    edit_tensors(qwen2, edit)
    with pytest.raises(ConfigError, match=named):
        load(qwen2)


def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        load(tmp_path)


class TestFiles:
    def test_a_missing_shard_is_named_before_any_tensor_is_read(self, tmp_path: Path) -> None:
        write_tiny_checkpoint(tmp_path, "llama", shards=3)
        (tmp_path / "model-00003-of-00003.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"model-00003-of-00003\.safetensors.*missing"):
            next(iterate_weights(tmp_path))

    def test_a_shard_outside_the_directory_is_not_followed(self, tmp_path: Path) -> None:
        write_tiny_checkpoint(tmp_path / "model", "llama", shards=2)
        index = tmp_path / "model" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}))
        save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "secret.safetensors")
        with pytest.raises(ConfigError, match="secret"):
            next(iterate_weights(tmp_path / "model"))

    def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(self, tmp_path: Path) -> None:
        write_tiny_checkpoint(tmp_path, "llama", shards=2)
        shard = tmp_path / "model-00001-of-00002.safetensors"
        tensors = load_file(shard)
        lost = sorted(tensors)[0]
        del tensors[lost]
        save_file(tensors, shard)
        with pytest.raises(ConfigError, match=lost.replace(".", r"\.")):
            list(iterate_weights(tmp_path))

    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_of_a_tensor_that_several_shards_have_the_indexs_is_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
    ) -> None:
        write_tiny_checkpoint(tmp_path, "llama", shards=3)
        wanted = logits(load(tmp_path))
        weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        own = tmp_path / f"model-0000{kept}-of-00003.safetensors"
        name = next(name for name, shard in weight_map.items() if shard == own.name)
        for shard in set(tmp_path.glob("*.safetensors")) - {own}:
            save_file(load_file(shard) | {name: torch.full_like(load_file(own)[name], 7.0)}, shard)
        assert torch.equal(logits(load(tmp_path)), wanted)
        assert [record.getMessage() for record in caplog.records] == [
            "tensors that the index does not name are ignored"
        ]

    def test_a_tensor_that_the_index_does_not_name_is_ignored_with_one_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_tiny_checkpoint(tmp_path, "llama", shards=2)
        wanted = logits(load(tmp_path))
        for shard in tmp_path.glob("*.safetensors"):
            save_file(load_file(shard) | {"old.head.weight": torch.ones(2, 2)}, shard)
        assert torch.equal(logits(load(tmp_path)), wanted)
        (record,) = caplog.records
        fields = record.fields  # type: ignore[attr-defined]
        assert fields["tensors"].count("old.head.weight in model-0000") == 2

    @pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
    def test_a_damaged_index_is_refused(self, tmp_path: Path, content: str) -> None:
        write_tiny_checkpoint(tmp_path, "llama", shards=2)
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ConfigError, match="not a valid index"):
            list(iterate_weights(tmp_path))

    def test_a_truncated_file_is_refused(self, qwen2: Path) -> None:
        path = qwen2 / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable"):
            load(qwen2)

    def test_a_directory_without_safetensors_is_refused(self, qwen2: Path) -> None:
        (qwen2 / "model.safetensors").rename(qwen2 / "pytorch_model.bin")
        with pytest.raises(ConfigError, match="only safetensors is supported"):
            load(qwen2)


class TestDigest:
    def test_equal_files_have_equal_digests(self, tmp_path: Path) -> None:
        first = write_tiny_checkpoint(tmp_path / "first", "llama", shards=2)
        second = write_tiny_checkpoint(tmp_path / "second", "llama", shards=2)
        assert weights_digest(first) == weights_digest(second)
        assert len(weights_digest(first)) == 32

    def test_one_changed_weight_changes_it(self, qwen2: Path) -> None:
        before = weights_digest(qwen2)
        edit_tensors(qwen2, lambda t: t["lm_head.weight"].view(-1)[-1].add_(1e-3))
        assert weights_digest(qwen2) != before

    def test_a_changed_config_changes_it(self, qwen2: Path) -> None:
        before = weights_digest(qwen2)
        edit_config(qwen2, rope_theta=20_000.0)
        assert weights_digest(qwen2) != before
