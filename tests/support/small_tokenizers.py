"""Tokenizers trained in a moment on a few lines, in the shapes that the supported model families have.

Each is written as a checkpoint's directory would hold it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

P = ParamSpec("P")

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "hello world, hello  there; spaces   matter\n\tand so do tabs and\nlines",
    "def encode(text): return [byte for byte in text.encode('utf-8')]",
    "日本語のテキスト 中文文本 한국어",
    "مرحبا بالعالم",
    "smile 🙂 and 👩‍👩‍👧‍👦 family, é and é",
] * 4

SAMPLES = [
    "hello world",
    " leading and trailing ",
    "日本語のテキスト、漢字と仮名。",
    "한국어 中文",
    "مرحبا بالعالم، كيف الحال؟",
    "👩‍👩‍👧‍👦🙂🏳️‍🌈",
    "e\u0301 a\u0308\u0304 \u0300alone",
    "नमस्ते မြန်မာ ไทย",
    "\u0000\u0007\ufffd\ufffd \uffff",
    "",
]

_SPECIAL = ["<unk>", "<s>", "</s>"]


def _trained_once(make: Callable[P, tokenizers.Tokenizer]) -> Callable[P, tokenizers.Tokenizer]:
    """Training takes longer than reading what it came to."""
    text = functools.cache(lambda *args, **kwargs: make(*args, **kwargs).to_str())

    @functools.wraps(make)
    def read(*args: P.args, **kwargs: P.kwargs) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(text(*args, **kwargs))

    return read


@_trained_once
def byte_level(prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM have it; adds <s> to prompts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("日本", special=False), AddedToken("<tool>", special=False)])
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


@_trained_once
def sentencepiece(prefix: str = "first") -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have it; adds <s> to prompts.

    `prefix`: where a space is put before text: first, always or never; "legacy" is always, done by a normalizer.
    """
    tokenizer = _byte_fallback_bpe()
    if prefix == "legacy":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.decoder = decoders.Sequence(_byte_fallback_decoders(strips=prefix != "never"))
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


@_trained_once
def unigram(prefix: str = "always", byte_fallback: bool = False) -> tokenizers.Tokenizer:
    """Unigram with metaspace, as T5 and many SentencePiece models have it; adds <s> to prompts."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = metaspace
    trainer = trainers.UnigramTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"] if piece != "<unk>"]
    low = min(score for _, score in pieces) - 10
    bytes_ = [(f"<0x{byte:02X}>", low) for byte in range(256)] if byte_fallback else []
    vocabulary = [*((token, 0.0) for token in _SPECIAL), *bytes_, *pieces]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = metaspace
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    if byte_fallback:
        tokenizer.decoder = decoders.Sequence(_byte_fallback_decoders(strips=prefix != "never"))
    else:
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


def _byte_fallback_bpe() -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], limit_alphabet=50, max_token_length=8, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [piece for piece in model["vocab"] if piece != "<unk>"]
    vocabulary = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def _byte_fallback_decoders(strips: bool) -> list[decoders.Decoder]:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return [*steps, decoders.Strip(" ", 1, 0)] if strips else steps


def save(tokenizer: tokenizers.Tokenizer, directory: Path, **config: Any) -> Path:
    """Write tokenizer.json, and tokenizer_config.json with `config` over the special tokens. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _bos_first(tokenizer: tokenizers.Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
