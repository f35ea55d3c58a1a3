"""The decoder against transformers in float32: logits close at every position, greedy tokens identical."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import select
from model.decoder import Decoder
from model.embedded import embedded_model_directory
from support.checkpoints import Family, TinyShape, write_tiny_checkpoint
from support.steps import Chunk, step

BLOCK_TOKENS = 16
PROMPT_LENGTH = 300  # more than one tile of attention
GREEDY_TOKENS = 64
LOGIT_TOLERANCE = 5e-5  # absolute, on logits of standard deviation 1 to 2
EMBEDDED_LOGIT_TOLERANCE = 5e-4  # the same on a standard deviation of 5, after 30 layers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Variation:
    family: Family
    shape: TinyShape
    tied: bool = False


VARIATIONS = {
    "llama": Variation("llama", TinyShape()),
    "llama, three query heads a group, tied": Variation(
        "llama", TinyShape(hidden_size=96, heads=6, kv_heads=2), tied=True
    ),
    "llama, no groups, attention bias": Variation("llama", TinyShape(kv_heads=4, attention_bias=True)),
    "llama, head size 20 of 80": Variation("llama", TinyShape(hidden_size=80)),
    "llama, llama3 rope": Variation("llama", TinyShape(rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE)),
    "llama, linear rope": Variation("llama", TinyShape(rope_scaling={"type": "linear", "factor": 4.0})),
    "qwen2": Variation("qwen2", TinyShape()),
    "qwen2, one group, tied": Variation("qwen2", TinyShape(kv_heads=1, rope_theta=1_000_000.0), tied=True),
    "qwen3, head size 32 of 64": Variation("qwen3", TinyShape(head_dim=32)),
    "qwen3, one group, tied": Variation("qwen3", TinyShape(head_dim=24, kv_heads=1), tied=True),
}


def load_transformers(directory: Path) -> Any:
    """The checkpoint in transformers, float32. Asserts that every tensor found its place."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,  # no token: go on to the end
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


@torch.inference_mode()
def transformers_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


class Ours:
    """A decoder with a cache for one sequence, its blocks in backward order."""

    def __init__(self, directory: Path, length: int) -> None:
        self.decoder = Decoder.load(directory, select("reference"), torch.float32)
        block_count = -(-length // BLOCK_TOKENS)
        self.cache = self.decoder.kernels.make_cache(self.decoder.cache_shape(block_count, BLOCK_TOKENS))
        self.blocks = range(block_count)[::-1]

    def logits(self, ids: list[int], start: int) -> torch.Tensor:
        return self.decoder.forward(step(Chunk(ids, start, self.blocks)), self.cache)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        output = [int(self.logits(prompt, 0)[-1].argmax())]
        while len(output) < count:
            output.append(int(self.logits(output[-1:], len(prompt) + len(output) - 1)[-1].argmax()))
        return output


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_tiny_model_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    variation = VARIATIONS[name]
    write_tiny_checkpoint(tmp_path, variation.family, seed=len(name), tied=variation.tied, shape=variation.shape)
    theirs, ours = load_transformers(tmp_path), Ours(tmp_path, PROMPT_LENGTH + GREEDY_TOKENS)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, variation.shape.vocab_size, (PROMPT_LENGTH,), generator=generator).tolist()
    wanted = transformers_logits(theirs, prompt)
    assert wanted.std() > 0.5, "logits too flat to tell anything"
    torch.testing.assert_close(ours.logits(prompt, 0), wanted, rtol=0, atol=LOGIT_TOLERANCE)
    assert ours.greedy(prompt, GREEDY_TOKENS) == transformers_greedy(theirs, prompt, GREEDY_TOKENS)


def test_a_checkpoint_that_transformers_saved_loads(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "written", "llama", shape=TinyShape(rope_scaling=LLAMA3_ROPE))
    load_transformers(tmp_path / "written").save_pretrained(tmp_path / "saved")
    assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
    ids = list(range(100))
    assert torch.equal(Ours(tmp_path / "saved", 100).logits(ids, 0), Ours(tmp_path / "written", 100).logits(ids, 0))


@pytest.mark.embedded
def test_the_embedded_model_agrees_with_transformers() -> None:
    from transformers import AutoTokenizer

    directory = embedded_model_directory()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    theirs = load_transformers(directory)
    output = transformers_greedy(theirs, prompt, GREEDY_TOKENS)
    answer = tokenizer.decode(output[: output.index(tokenizer.eos_token_id)])
    assert answer == "The capital of France is Paris."
    # All of ours in one pass over theirs: by induction the greedy tokens are the same, and a decode step gives the
    # bits of this pass (the equalities' tests hold that).
    ids = prompt + output[:-1]
    ours = Ours(directory, len(ids) + 1)
    logits = ours.logits(ids, 0)
    torch.testing.assert_close(logits, transformers_logits(theirs, ids), rtol=0, atol=EMBEDDED_LOGIT_TOLERANCE)
    assert logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == output
    assert torch.equal(ours.logits(ids[-1:], len(ids) - 1), logits[-1:])
