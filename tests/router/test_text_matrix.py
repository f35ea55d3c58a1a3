"""Every shape of tokenizer, with its tokens in every file they may be in: ids and text equal transformers' own.

For each checkpoint of the matrix: the ids of 200 generated strings as prompts and in chats, and what streams out after
each of them, beside AutoTokenizer for the same directory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from router.text import ChatMessage, Detokenizer, Tokenizer
from support import small_tokenizers

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if pad_token is defined %}{{ pad_token }}{% endif %}{{ image_token }}{{ unk_token }} go"
)

PIECES = [
    *"abcxyz .,!?'-_/\\0123456789",
    *("hello", " world", "  ", "\t", "\n", "\r\n", "   the", "quick brown", " fox", "don't", "▁", "<0x41>", "Ġ"),
    *("🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "👍🏽", "e\u0301", "a\u0308\u0304", "\u0300", "é", "Å", "ﬁ", "①"),
    *("日本語", "漢字", "中文", "한국어", "ﾃｷｽﾄ", "مرحبا", "שלום", "\u200f", "\u202e", "नमस्ते", "မြန်မာ", "ไทย"),
    *("\u0000", "\u0007", "\u001b[31m", "\u007f", "\ufffd", "\uffff", "\u00a0", "\u2028", "\u200d", "\ufeff"),
    *("<s>", "</s>", "<unk>", "<s", "s>", "< s>", "<S>", "</s></s>", " <s> ", "<pad>", "<|end|>", "<|end|", "<tool>"),
    *("<think>", "<image>", "<|endoftext|>", "日本", "word", "sword", " word "),
]


def _texts(count: int = 200) -> list[str]:
    rng = random.Random(8)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 8))) for _ in range(count)]


TEXTS = _texts()

Shape = Callable[[], tokenizers.Tokenizer]

SHAPES: dict[str, Shape] = {
    "byte-level": small_tokenizers.byte_level,
    "byte-level, prefix space": lambda: small_tokenizers.byte_level(prefix_space=True),
    **{f"byte fallback, {p}": lambda p=p: small_tokenizers.sentencepiece(p) for p in ("first", "always", "never")},
    "byte fallback, legacy": lambda: small_tokenizers.sentencepiece("legacy"),
    **{f"unigram, {p}": lambda p=p: small_tokenizers.unigram(p) for p in ("first", "always", "never")},
    "unigram, byte fallback": lambda: small_tokenizers.unigram("always", byte_fallback=True),
}


def _token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


def _object(text: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **_token(text, special=True, **flags)}


@dataclass(frozen=True)
class Layout:
    """Which file says what; None: there is no such file."""

    config: dict[str, Any] = field(default_factory=dict)
    special_tokens_map: dict[str, Any] | None = None
    added_tokens: dict[str, int] | None = None

    def write(self, directory: Path, pipeline: tokenizers.Tokenizer, model_type: str = "llama") -> Path:
        directory.mkdir(parents=True)
        pipeline.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        files = {
            "tokenizer_config.json": {name: value for name, value in config.items() if value != "absent"},
            "special_tokens_map.json": self.special_tokens_map,
            "added_tokens.json": self.added_tokens,
            "config.json": {"model_type": model_type},
        }
        for name, content in files.items():
            if content is not None:
                (directory / name).write_text(json.dumps(content), encoding="utf-8")
        (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        return directory


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

LAYOUTS = {
    "names in the config": Layout(NAMES),
    "nothing but the pipeline": Layout(),
    "objects in the config": Layout(
        {
            **{name: _object(text) for name, text in NAMES.items()},
            "additional_special_tokens": [_object("<|end|>", lstrip=True), "<image>"],
        }
    ),
    "names only in special_tokens_map.json": Layout(
        special_tokens_map={**NAMES, "additional_special_tokens": ["<|end|>", "<tool>"]}
    ),
    "objects in special_tokens_map.json": Layout(
        {"eos_token": "<unk>", "extra_special_tokens": ["<think>"]},
        special_tokens_map={name: _token(text, rstrip=name == "pad_token") for name, text in NAMES.items()},
    ),
    "added_tokens.json": Layout(
        NAMES, special_tokens_map={"pad_token": None, "image_token": "<image>"}, added_tokens={"<think>": 9, "<pad>": 8}
    ),
    "added_tokens_decoder beyond the vocabulary": Layout(
        {
            **NAMES,
            "added_tokens_decoder": {
                "1": _token("<s>", special=True),
                "2000": _token("<|end|>", special=True),
                "1000": _token("<think>", special=False),
                "1001": _token("word", special=False, single_word=True, lstrip=True, normalized=True),
            },
        },
        special_tokens_map={"bos_token": "<tool>", "sep_token": "<sep>"},
        added_tokens={"<image>": 7},
    ),
    "names of its own": Layout(
        {**NAMES, "image_token": "<image>", "extra_special_tokens": {"end_token": "<|end|>", "think": "<think>"}}
    ),
    "special tokens split": Layout({**NAMES, "split_special_tokens": True}),
}

CLASSES: dict[str, tuple[Shape, str, dict[str, Any]]] = {
    f"{kind}, {json.dumps(settings)}": (make, model_type, {"tokenizer_class": kind, **settings})
    for kind, model_type, make, every in [
        (
            "LlamaTokenizerFast",
            "llama",
            lambda: small_tokenizers.sentencepiece("legacy"),
            [
                {},
                {"legacy": True},
                {"legacy": False, "add_prefix_space": True},
                {"add_prefix_space": False},
                {"add_prefix_space": None, "bos_token": None},
            ],
        ),
        ("LlamaTokenizer", "llama", small_tokenizers.byte_level, [{"add_prefix_space": True}]),
        ("LlamaTokenizer", "qwen2", small_tokenizers.byte_level, [{"add_prefix_space": True}]),
        ("Qwen2Tokenizer", "qwen2", small_tokenizers.byte_level, [{}, {"add_prefix_space": True}]),
        ("PreTrainedTokenizerFast", "qwen3", small_tokenizers.byte_level, [{"add_prefix_space": True}]),
        ("absent", "qwen3", small_tokenizers.byte_level, [{"add_prefix_space": True}]),
        ("absent", "llama", lambda: small_tokenizers.sentencepiece("legacy"), [{}]),
        ("GPT2Tokenizer", "llama", small_tokenizers.byte_level, [{}, {"add_prefix_space": True}]),
    ]
    for settings in every
}


MATRIX = [
    (shape, layout)
    for shape in SHAPES
    for layout in LAYOUTS
    if shape in ("byte-level", "byte fallback, first", "unigram, always")
    or layout in ("names in the config", "added_tokens_decoder beyond the vocabulary")
]


@pytest.mark.parametrize(("shape", "layout"), MATRIX)
def test_shape_and_layout_equal_transformers(tmp_path: Path, shape: str, layout: str) -> None:
    check_equal(LAYOUTS[layout].write(tmp_path / "checkpoint", SHAPES[shape]()))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("layout", ["names in the config", "nothing but the pipeline"])
def test_class_equals_transformers(tmp_path: Path, kind: str, layout: str) -> None:
    make, model_type, settings = CLASSES[kind]
    changed = Layout({**LAYOUTS[layout].config, **settings})
    check_equal(changed.write(tmp_path / "checkpoint", make(), model_type))


def check_equal(directory: Path) -> None:
    ours, theirs = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    others = TEXTS[::-1]
    prompts, outputs = theirs(TEXTS)["input_ids"], theirs(others, add_special_tokens=False)["input_ids"]
    assert [ours.encode(text) for text in TEXTS] == prompts
    assert [ours.encode(text, add_special_tokens=False) for text in others] == outputs
    turns = [(ChatMessage("user", a), ChatMessage("assistant", b)) for a, b in zip(TEXTS, others, strict=True)]
    chats = theirs.apply_chat_template([[m._asdict() for m in chat] for chat in turns], return_dict=False)
    assert [ours.apply_chat_template(chat, add_generation_prompt=False) for chat in turns] == chats
    check_texts(ours, theirs, prompts, outputs)
    check_texts(ours, theirs, [chat[index % len(chat) :] for index, chat in enumerate(chats)], outputs)


def check_texts(
    ours: Tokenizer, theirs: PreTrainedTokenizerBase, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Each output, and any ids after it, beside what decoding it with its prompt has beyond the prompt."""
    rng = random.Random(8)
    outputs = [[*output, *(rng.randrange(ours.vocab_size + 20) for _ in range(4))] for output in outputs]
    befores = theirs.batch_decode(prompts, skip_special_tokens=True)
    both = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    wholes = theirs.batch_decode(both, skip_special_tokens=True)
    assert [ours.decode(ids) for ids in both] == wholes
    for prompt, output, before, whole in zip(prompts, outputs, befores, wholes, strict=True):
        detokenizer = Detokenizer(ours, prompt)
        streamed = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.finish()
        assert streamed == whole[len(before) :], (prompt, output)
