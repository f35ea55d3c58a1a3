"""Loading a checkpoint's tokenizer: the same ids as transformers, and errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.embedded import embedded_model_directory
from pdserve.errors import ConfigError
from router.text import Tokenizer
from support import small_tokenizers
from support.length import times

CONFIGS = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_eos_token": True},
    {"add_bos_token": True, "bos_token": {"content": "</s>", "__type": "AddedToken"}},
    {"eos_token": "<tool>"},
    {"additional_special_tokens": ["<extra>"]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=json.dumps)
@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_ids_and_text_equal_transformers(tmp_path: Path, make: Callable, config: dict) -> None:
    directory = small_tokenizers.save(make(), tmp_path, **config)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in [*small_tokenizers.SAMPLES, "<s>hello</s> <tool> <extra>world"]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_added_tokens_that_only_the_config_has_equal_transformers(tmp_path: Path) -> None:
    pipeline = small_tokenizers.byte_level()
    first = pipeline.get_vocab_size()
    added = {
        str(first): {"content": "<think>", "special": False, "normalized": False},
        str(first + 1): {"content": "<|end|>", "special": True, "normalized": False},
    }
    directory = small_tokenizers.save(pipeline, tmp_path, added_tokens_decoder=added)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    text = "a<think>b</s><|end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert {first, first + 1} <= set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.fixture(scope="module")
def embedded_pair() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    directory = embedded_model_directory()
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.embedded
@settings(deadline=None, max_examples=times(100))
@given(text=st.text(max_size=60) | st.sampled_from(small_tokenizers.SAMPLES))
def test_embedded_model_ids_equal_transformers(
    embedded_pair: tuple[Tokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = embedded_pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_of_the_training_run_are_off(tmp_path: Path) -> None:
    pipeline = small_tokenizers.byte_level()
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    tokenizer = Tokenizer.load(small_tokenizers.save(pipeline, tmp_path))
    ids = tokenizer.encode("an unusual sentence")
    assert tokenizer.decode(ids) == "an unusual sentence"
    assert 4 < len(ids) < 64


def test_token_has_no_text_if_it_is_special_or_unknown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path))
    assert tokenizer.token(1) is None
    assert tokenizer.token(tokenizer.vocab_size) is None
    assert tokenizer.token(tokenizer.vocab_size - 1) is not None


def test_config_may_be_absent(tmp_path: Path) -> None:
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).encode("hello")[0] == 1


def test_token_that_was_declared_twice_is_as_special_as_a_decode_takes_it(tmp_path: Path) -> None:
    pipeline = small_tokenizers.byte_level()
    token_id = pipeline.token_to_id("</s>")
    added = {str(token_id): {"content": "</s>", "special": False, "lstrip": True}}
    directory = small_tokenizers.save(pipeline, tmp_path, added_tokens_decoder=added, eos_token=None)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    assert (ours.token(token_id) is None) == (theirs.decode([token_id], skip_special_tokens=True) == "")


def test_class_that_is_not_known_takes_the_pipeline_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "plain"))
    other = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "other", tokenizer_class="CohereTokenizer")
    assert Tokenizer.load(other).encode("hello 12") == plain.encode("hello 12")
    assert [record.getMessage() for record in caplog.records] == ["tokenizer.json is used as it is"]


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: No such file"),
        ("tokenizer.json", b"{", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer\.json: not UTF-8"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: must hold a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": 1}]}', r"tokenizer_config\.json: malformed"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', r"tokenizer_config\.json: malformed"),
        ("tokenizer_config.json", b'{"chat_template": 7}', r"tokenizer_config\.json: malformed"),
        ("special_tokens_map.json", b"[]", r"special_tokens_map\.json: must hold a JSON object"),
        ("special_tokens_map.json", b'{"bos_token": 7}', r"special_tokens_map\.json: malformed"),
        ("added_tokens.json", b"{", r"added_tokens\.json: not valid JSON"),
        ("added_tokens.json", b'{"<x>": "one"}', r"added_tokens\.json: malformed"),
        ("config.json", b"", r"config\.json: not valid JSON"),
        ("chat_template.jinja", b"{% for %}", r"chat template, line 1"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: not UTF-8"),
    ],
)
def test_missing_or_corrupt_file_is_named(tmp_path: Path, file: str, content: bytes | None, named: str) -> None:
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=named) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
