"""Tokens to text, one token at a time, with the same result as decoding them all at once.

A tokenizer.json names a decoder for whole sequences. Each class here is the streaming form of one of the decoders that
the supported model families use: it gives out what no later token can change, and keeps the rest. All of them spend
constant time a token. A decoder without a streaming form here is refused at load: text that differs from the whole
decode by the way it was streamed would break the promise that an attempt can be replayed.

They get token strings, not ids; special tokens are already gone.

An output's text begins where its prompt's text ends: it is what decoding both has beyond the length of the prompt's
own decode. What of a prompt matters for that is its end, and whether it has text at all: `follow` reads it from the
last token backwards and stops soon.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pdserve.errors import ConfigError

REPLACEMENT_CHARACTER: Final = "\ufffd"

# A run of byte tokens is text only if the whole run is valid UTF-8, so it is held back until it ends. After this many
# bytes its finished characters are given out all the same.
MAX_HELD_BYTES: Final = 256

_MAX_UNFINISHED_BYTES: Final = 3  # of a character in UTF-8

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class StreamDecoder(Protocol):
    """Decodes one sequence. `push` and `finish` return text that is final."""

    def follow(self, prompt: Iterator[str]) -> int:
        """Stand where decoding a prompt's tokens has led; before the first push. `prompt` yields them from the last to
        the first, and no more is taken than matters. Returns how many characters of the text to come are the prompt's:
        those that were not final at its end."""
        ...

    def push(self, tokens: Sequence[str]) -> str: ...

    def finish(self) -> str: ...


def stream_decoder(spec: Mapping[str, Any] | None) -> Callable[[], StreamDecoder]:
    """A factory of decoders for `spec`, the "decoder" of a tokenizer.json. Raises ConfigError for an unknown one."""
    steps = _flatten(spec)
    kinds = [step["type"] for step in steps]
    if not steps:
        return SpaceJoinDecoder
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder
    if kinds == ["Metaspace"]:
        replacement, drops_first = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        return lambda: MetaspaceDecoder(replacement, drops_first)
    form = _sentencepiece_form(steps)
    if form is None:
        raise ConfigError(f"decoder {' + '.join(kinds)} is not supported")
    return lambda: SentencePieceDecoder(form)


def _flatten(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [step for inner in spec["decoders"] for step in _flatten(inner)]
    return [spec]


class SpaceJoinDecoder:
    """No decoder: tokens with a space between them."""

    def __init__(self) -> None:
        self._separator = ""

    def follow(self, prompt: Iterator[str]) -> int:
        if next(prompt, None) is not None:
            self._separator = " "
        return 0

    def push(self, tokens: Sequence[str]) -> str:
        if not tokens:
            return ""
        text = self._separator + " ".join(tokens)
        self._separator = " "
        return text

    def finish(self) -> str:
        return ""


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level token stands for: itself if printable, else 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_ALPHABET: Final = _byte_alphabet()


class ByteLevelDecoder:
    """Byte-level BPE (Llama 3, Qwen, SmolLM): each token is bytes, the text is their UTF-8.

    At most three bytes are held back: the beginning of a character. Invalid bytes become U+FFFD as soon as it is
    certain that they are.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def follow(self, prompt: Iterator[str]) -> int:
        """An unfinished character is at most three bytes, and decodes to one U+FFFD."""
        end = b""
        for token in prompt:
            end = token_bytes(token) + end
            if len(end) >= _MAX_UNFINISHED_BYTES:
                break
        self._utf8.decode(end)
        unfinished, _ = self._utf8.getstate()
        return 1 if unfinished else 0

    def push(self, tokens: Sequence[str]) -> str:
        return self._utf8.decode(b"".join(map(token_bytes, tokens)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for."""
    try:
        return bytes([_BYTE_ALPHABET[char] for char in token])
    except KeyError:  # an added token: its own text
        return token.encode()


class MetaspaceDecoder:
    """Tokens in which `replacement` stands for a space; in the first token it stands for nothing if `drops_first`."""

    def __init__(self, replacement: str, drops_first: bool) -> None:
        self._replacement = replacement
        self._space = "" if drops_first else " "

    def follow(self, prompt: Iterator[str]) -> int:
        if next(prompt, None) is not None:
            self._space = " "
        return 0

    def push(self, tokens: Sequence[str]) -> str:
        text = ""
        for token in tokens:
            text += token.replace(self._replacement, self._space)
            self._space = " "
        return text

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class SentencePieceForm:
    """What a SentencePiece-like decoder does, in this order: replace in each token, turn byte tokens into bytes,
    strip up to `strip_count` times `strip_char` from the start of the text."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strip_char: str
    strip_count: int


def _sentencepiece_form(steps: Sequence[Mapping[str, Any]]) -> SentencePieceForm | None:
    """Read Replace* ByteFallback? Fuse? Strip?, the Strip of whole text at the left only; None if it is not that."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = _take(rest, "ByteFallback") is not None
    fuse = _take(rest, "Fuse")
    strip = _take(rest, "Strip") if fuse is not None else None
    if rest or (strip is not None and strip["stop"] != 0):
        return None
    if strip is None:
        return SentencePieceForm(tuple(replacements), byte_fallback, "", 0)
    return SentencePieceForm(tuple(replacements), byte_fallback, strip["content"], strip["start"])


def _take(steps: list[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return steps.pop(0) if steps and steps[0]["type"] == kind else None


class SentencePieceDecoder:
    """SentencePiece-like BPE (Llama 2, Mistral, Gemma): tokens are text, rare characters are runs of byte tokens.

    A run of byte tokens is one unit: valid UTF-8 as a whole, or one U+FFFD a byte. It is held back until another token
    ends it or it turns out invalid. The one exception to equality with the whole decode: of a run longer than
    MAX_HELD_BYTES that turns out invalid later, the characters given out until then stay. So do those of a prompt that
    ends in such a run.
    """

    def __init__(self, form: SentencePieceForm) -> None:
        self._form = form
        self._run = _ByteRun()
        self._strip_left = form.strip_count

    def follow(self, prompt: Iterator[str]) -> int:
        """What matters is the run of byte tokens at the end, of a long one its last bytes, and whether there is text
        before it from which nothing is stripped any more."""
        end: list[str] = []
        for token in prompt:
            end.append(token)
            piece = self._piece(token)
            if isinstance(piece, str) and (not self._strip_left or piece.strip(self._form.strip_char)):
                self._strip_left = 0
                break
            if len(end) == MAX_HELD_BYTES:
                self._strip_left = 0
                while end and _is_within_character(self._piece(end[-1])):
                    end.pop()
                break
        self.push(end[::-1])
        strip_left = self._strip_left
        held = len(self._strip(self._run.held_text()))
        self._strip_left = strip_left
        return held

    def push(self, tokens: Sequence[str]) -> str:
        return self._strip("".join(map(self._decode, tokens)))

    def finish(self) -> str:
        return self._strip(self._run.end())

    def _decode(self, token: str) -> str:
        piece = self._piece(token)
        return self._run.push(piece) if isinstance(piece, int) else self._run.end() + piece

    def _piece(self, token: str) -> str | int:
        """The token's text, or its byte."""
        for pattern, content in self._form.replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token) if self._form.byte_fallback else None
        return token if match is None else int(match[1], 16)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            kept = text.removeprefix(self._form.strip_char)
            if len(kept) == len(text):  # the text has begun
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = kept
        return text


class _ByteRun:
    """One run of byte tokens after the other."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._text = ""  # finished characters that are held back
        self._held_bytes = 0  # theirs, and those of the unfinished one
        self._invalid = False

    def push(self, byte: int) -> str:
        if self._invalid:
            return REPLACEMENT_CHARACTER
        self._held_bytes += 1
        try:
            self._text += self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._invalid = True
            return REPLACEMENT_CHARACTER * self._held_bytes
        return self._give_out() if self._held_bytes > MAX_HELD_BYTES else ""

    def _give_out(self) -> str:
        text, self._text = self._text, ""
        self._held_bytes -= len(text.encode())
        return text

    def end(self) -> str:
        """Another token came, or nothing more will: the text of the run that was still held back."""
        text = self.held_text()
        if self._held_bytes:
            self._begin()
        return text

    def held_text(self) -> str:
        """What the run's end would give out."""
        if self._invalid:  # given out byte by byte
            return ""
        unfinished, _ = self._utf8.getstate()
        return REPLACEMENT_CHARACTER * self._held_bytes if unfinished else self._text


def _is_within_character(piece: str | int) -> bool:
    return isinstance(piece, int) and piece & 0xC0 == 0x80
