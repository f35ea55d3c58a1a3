"""Tokenizers trained in a moment on a few lines, in the shapes that the supported model families have.

Each is written as a checkpoint's directory would hold it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

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


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM have it; adds <s> to prompts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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


def sentencepiece() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have it; adds <s> to prompts."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = metaspace
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], limit_alphabet=50, max_token_length=8, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [piece for piece in model["vocab"] if piece != "<unk>"]
    vocabulary = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = metaspace
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = _bos_first(tokenizer)
    return tokenizer


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
