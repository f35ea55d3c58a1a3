"""Incremental decoding equals decoding at once, whatever the ids and the cuts."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from model.embedded import embedded_model_directory
from pdserve.errors import ConfigError
from router.text import Detokenizer, StopStrings, Tokenizer
from router.text.decoders import MAX_HELD_BYTES, token_bytes
from support import small_tokenizers
from support.length import times

UNKNOWN_ID = 10_000_000


def _with_decoder(pipeline: tokenizers.Tokenizer, decoder: decoders.Decoder | None) -> Tokenizer:
    pipeline.decoder = decoder
    return Tokenizer(pipeline, None)


@pytest.fixture(scope="module")
def shapes() -> dict[str, Tokenizer]:
    sentencepiece = small_tokenizers.sentencepiece
    gemma = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    strip_two = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    return {
        "byte-level": Tokenizer(small_tokenizers.byte_level(), None),
        "sentencepiece": Tokenizer(sentencepiece(), None),
        "no strip": _with_decoder(sentencepiece(), gemma),
        "strip two, no bytes": _with_decoder(sentencepiece(), strip_two),
        "metaspace": _with_decoder(sentencepiece(), decoders.Metaspace()),
        "metaspace, never": _with_decoder(sentencepiece(), decoders.Metaspace(prepend_scheme="never")),
        "none": _with_decoder(sentencepiece(), None),
    }


SHAPES = [
    "byte-level",
    "sentencepiece",
    "no strip",
    "strip two, no bytes",
    "metaspace",
    "metaspace, never",
    "none",
]


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    return Tokenizer.load(embedded_model_directory())


def streamed(tokenizer: Tokenizer, pushes: list[list[int]], prompt: Sequence[int] = ()) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.push(push) for push in pushes) + detokenizer.finish()


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


def cut_at_random(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    start = 0
    while start < len(ids):
        size = rng.choice([0, 1, 1, 2, 3, 8])
        yield ids[start : start + size]
        start += size


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=times(150))
@given(data=st.data(), rng=st.randoms())
def test_any_ids_in_any_cut_give_the_whole_decode(
    shapes: dict[str, Tokenizer], shape: str, data: st.DataObject, rng: random.Random
) -> None:
    tokenizer = shapes[shape]
    vocabulary = st.integers(0, tokenizer.vocab_size - 1)
    first_tokens = st.integers(0, 300)  # where special tokens and single bytes are
    ids = data.draw(st.lists(vocabulary | first_tokens | st.just(UNKNOWN_ID), max_size=40))
    assert streamed(tokenizer, list(cut_at_random(ids, rng))) == tokenizer.decode(ids)


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=200)
@given(data=st.data(), rng=st.randoms())
def test_after_any_prompt_the_text_is_what_the_whole_decode_has_beyond_it(
    shapes: dict[str, Tokenizer], shape: str, data: st.DataObject, rng: random.Random
) -> None:
    tokenizer = shapes[shape]
    some = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 270) | st.just(UNKNOWN_ID)
    spaces = st.just(tokenizer.encode(" ", add_special_tokens=False)[-1])
    prompt, output = data.draw(st.lists(some | spaces, max_size=12)), data.draw(st.lists(some | spaces, max_size=12))
    text = streamed(tokenizer, list(cut_at_random(output, rng)), prompt)
    assert text == tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_text_of_every_script_comes_back_wherever_prompt_and_output_meet(
    shapes: dict[str, Tokenizer], shape: str
) -> None:
    tokenizer = shapes[shape]
    for text in small_tokenizers.SAMPLES:
        ids = tokenizer.encode(text)
        for cut in range(len(ids) + 1):
            beyond = tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :]
            assert streamed(tokenizer, one_by_one(ids[cut:]), ids[:cut]) == beyond


@pytest.mark.parametrize("shape", ["sentencepiece", "metaspace", "no strip"])
def test_leading_space_of_a_completion_is_kept_and_a_stop_string_that_begins_with_it_matches(
    shapes: dict[str, Tokenizer], shape: str
) -> None:
    tokenizer = shapes[shape]
    ids = {tokenizer.token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    prompt, output = tokenizer.encode("the quick"), [ids[letter] for letter in "▁brown"]
    assert streamed(tokenizer, one_by_one(output), prompt) == " brown"
    detokenizer, stops = Detokenizer(tokenizer, prompt), StopStrings([" brown"])
    matches = [stops.push(detokenizer.push([token_id]))[1] for token_id in output]
    assert matches[-1] == " brown"


def test_after_special_tokens_alone_an_output_begins_the_text(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    output = tokenizer.encode("the fox", add_special_tokens=False)
    assert streamed(tokenizer, one_by_one(output), [1, 2, UNKNOWN_ID, 1]) == "the fox"


@pytest.mark.parametrize("chars", [1, MAX_HELD_BYTES // 3, MAX_HELD_BYTES // 3 + 1, MAX_HELD_BYTES])
def test_prompt_that_ends_in_a_run_of_byte_tokens_of_any_length_goes_on(
    shapes: dict[str, Tokenizer], chars: int
) -> None:
    tokenizer, text = shapes["sentencepiece"], "ဗမာ" * MAX_HELD_BYTES
    ids, cut = [3 + byte for byte in text.encode()], 3 * chars
    assert streamed(tokenizer, one_by_one(ids[cut:]), ids[:cut]) == text[chars:]


class _Counting:
    """Says how often a token was looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.new_decoder = tokenizer.new_decoder
        self.looked_up = 0

    def token(self, token_id: int) -> str | None:
        self.looked_up += 1
        return self._tokenizer.token(token_id)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", ["hello ", "日本語", " "])
def test_cost_of_a_prompt_does_not_grow_with_its_length(shapes: dict[str, Tokenizer], shape: str, text: str) -> None:
    counting = _Counting(shapes[shape])
    Detokenizer(counting, shapes[shape].encode(text * 5000))
    assert 1 <= counting.looked_up <= MAX_HELD_BYTES


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", small_tokenizers.SAMPLES)
def test_text_of_every_script_comes_back_token_by_token(shapes: dict[str, Tokenizer], shape: str, text: str) -> None:
    tokenizer = shapes[shape]
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, one_by_one(ids)) == tokenizer.decode(ids)


@pytest.mark.embedded
@settings(deadline=None, max_examples=times(150))
@given(data=st.data(), rng=st.randoms())
def test_embedded_model_any_ids_in_any_cut_give_the_whole_decode(
    embedded: Tokenizer, data: st.DataObject, rng: random.Random
) -> None:
    ids = data.draw(st.lists(st.integers(0, embedded.vocab_size) | st.integers(0, 300), max_size=40))
    assert streamed(embedded, list(cut_at_random(ids, rng))) == embedded.decode(ids)


@pytest.mark.embedded
@settings(deadline=None, max_examples=times(200))
@given(st.text(max_size=30))
def test_embedded_model_any_text_comes_back_token_by_token(embedded: Tokenizer, text: str) -> None:
    ids = embedded.encode(text)
    assert streamed(embedded, one_by_one(ids)) == embedded.decode(ids)


def test_every_kind_of_invalid_utf8_gives_the_whole_decode(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["byte-level"]
    edges = (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF4, 0xF5)
    tokens = {token_bytes(tokenizer.token(i) or ""): i for i in range(tokenizer.vocab_size)}
    byte_ids = [tokens[bytes((byte,))] for byte in edges]
    for ids in itertools.product(byte_ids, repeat=4):
        assert streamed(tokenizer, one_by_one(list(ids))) == tokenizer.decode(ids)


def test_characters_are_never_split(shapes: dict[str, Tokenizer]) -> None:
    text = "日本語 👩‍👩‍👧‍👦 é ไทย"
    for shape in ("byte-level", "sentencepiece"):
        detokenizer = Detokenizer(shapes[shape])
        pieces = [detokenizer.push([token_id]) for token_id in shapes[shape].encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + detokenizer.finish() == text


def test_special_tokens_have_no_text_even_inside_a_character(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    first, *rest = (3 + byte for byte in "語".encode())
    ids = [1, first, 2, *rest, 2]
    assert streamed(tokenizer, one_by_one(ids)) == tokenizer.decode(ids) == "語"


def test_leading_space_is_stripped_once_and_only_at_the_start(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert streamed(tokenizer, one_by_one(ids + ids)) == "the fox the fox"


def test_unfinished_character_comes_out_at_the_end(shapes: dict[str, Tokenizer]) -> None:
    for shape in ("byte-level", "sentencepiece"):
        tokenizer = shapes[shape]
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("🦊", add_special_tokens=False)[:-1]
        assert "".join(detokenizer.push([token_id]) for token_id in ids).strip() == ""
        assert detokenizer.finish() == tokenizer.decode(ids).strip()


def test_endless_invalid_bytes_are_not_held_back(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([3 + 0x80]) for _ in range(5)] == ["\ufffd"] * 5


def test_long_run_of_byte_tokens_is_given_out_before_it_ends(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    text = "ဗမာ" * MAX_HELD_BYTES
    ids = [3 + byte for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer)
    emitted = ""
    for count, token_id in enumerate(ids, 1):
        emitted += detokenizer.push([token_id])
        assert count - len(emitted.encode()) <= MAX_HELD_BYTES
    assert emitted + detokenizer.finish() == text


def test_of_a_long_run_that_turns_out_invalid_only_the_held_bytes_are_replaced(shapes: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(shapes["sentencepiece"])
    valid = b"a" * (MAX_HELD_BYTES + 3)
    assert detokenizer.push([3 + byte for byte in valid]) == "a" * (MAX_HELD_BYTES + 1)
    assert detokenizer.push([3 + 0xFF, 3 + ord("a")]) + detokenizer.finish() == "\ufffd" * 4


def test_fresh_detokenizer_fed_with_the_past_goes_on_as_the_old_one(shapes: dict[str, Tokenizer]) -> None:
    for tokenizer in shapes.values():
        ids = tokenizer.encode("hello 日本語 🙂 ไทย")
        for cut in range(len(ids) + 1):
            old, fresh = Detokenizer(tokenizer), Detokenizer(tokenizer)
            assert fresh.push(ids[:cut]) == "".join(old.push([token_id]) for token_id in ids[:cut])
            rest = one_by_one(ids[cut:])
            assert [fresh.push(push) for push in rest] == [old.push(push) for push in rest]
            assert fresh.finish() == old.finish()


def test_cost_of_a_token_does_not_grow_with_the_sequence(shapes: dict[str, Tokenizer]) -> None:
    tokenizer = shapes["sentencepiece"]
    detokenizer = Detokenizer(tokenizer)
    pushes = one_by_one(tokenizer.encode("hello 日本語 ") * 200)

    def seconds_of_a_round() -> float:
        start = time.thread_time()
        for push in pushes:
            detokenizer.push(push)
        return time.thread_time() - start

    early = min(seconds_of_a_round() for _ in range(5))
    for _ in range(20):
        seconds_of_a_round()
    assert min(seconds_of_a_round() for _ in range(5)) < 3 * early


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("▁+"), " "), decoders.Fuse()]),
    ],
)
def test_decoder_without_a_streaming_form_is_refused(decoder: decoders.Decoder) -> None:
    pipeline = small_tokenizers.sentencepiece()
    with pytest.raises(ConfigError, match=r"decoder .* is not supported"):
        _with_decoder(pipeline, decoder)
