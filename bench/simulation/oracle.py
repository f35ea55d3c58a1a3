"""What is right: every request's whole token stream, and the KV of each of its tokens.

An output token is a hash of (seed, request, position). The KV of a token is a pair of 64-bit tags that hang together:
each is a hash of the one before it and the token, so a tag stands for the whole prefix and for nothing else.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace

import numpy as np
from xxhash import xxh3_64_intdigest

from pdserve.types import Finish, SamplingParams

VOCAB_SIZE = 512
EOS = 2
_FIRST_TOKEN = 16  # those below are special
_LAYER_FACTOR = 0x9E3779B97F4A7C15
_LINK = struct.Struct("<QI")


class Violation(BaseException):
    """Something happened that must not. Not an Exception: no supervisor of the product may swallow it."""


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One request as it must go. `tags` is uint64 [layer, token, K or V]; `finish` is the end without interference."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...]
    finish: Finish
    tags: np.ndarray

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids


class Oracle:
    """All scripts of one run."""

    def __init__(self, seed: int, layer_count: int) -> None:
        self._seed = seed
        self._layer_count = layer_count
        self._scripts: dict[str, Script] = {}
        self._places: dict[int, tuple[Script, int]] = {}  # by the K tag of layer 0

    def write(self, request_id: str, prompt_count: int, params: SamplingParams) -> Script:
        """Decide everything about a request with a prompt of this length."""
        rng = random.Random(f"{self._seed}/{request_id}")
        first = _FIRST_TOKEN + len(self._scripts)  # no two prompts begin alike: a prefix is one request's
        prompt = (first, *(rng.randrange(_FIRST_TOKEN, VOCAB_SIZE) for _ in range(prompt_count - 1)))
        output: list[int] = []
        finish: Finish | None = None
        while finish is None:
            output.append(self._token(request_id, len(output)))
            finish = params.end_of(output, (EOS,))
        tags = self._tags(prompt + tuple(output))
        script = Script(request_id, prompt, params, tuple(output), finish, tags)
        self._scripts[request_id] = script
        for position, tag in enumerate(tags[0, :, 0].tolist()):
            if tag in self._places:
                raise AssertionError("two prefixes share a tag")
            self._places[tag] = script, position
        return script

    def with_stop_id(self, request_id: str, prompt_count: int, params: SamplingParams, at: int) -> Script:
        """A script whose output number `at` is one of its stop ids."""
        return self.write(request_id, prompt_count, replace(params, stop_token_ids=(self._token(request_id, at),)))

    def script(self, request_id: str) -> Script:
        return self._scripts[request_id]

    def at(self, previous_tag: int, token_id: int) -> tuple[Script, int]:
        """Whose token this is, and its position, if it follows the prefix of `previous_tag` (0: none)."""
        place = self._places.get(_next_tag(previous_tag, token_id))
        if place is None:
            raise Violation(f"token {token_id} after tag {previous_tag:016x} is nobody's prefix: KV of something else")
        return place

    def _token(self, request_id: str, index: int) -> int:
        word = xxh3_64_intdigest(f"{self._seed}/{request_id}/{index}".encode())
        return EOS if word % 61 == 0 else _FIRST_TOKEN + word % (VOCAB_SIZE - _FIRST_TOKEN)

    def _tags(self, token_ids: tuple[int, ...]) -> np.ndarray:
        chain: list[int] = []
        for token_id in token_ids:
            chain.append(_next_tag(chain[-1] if chain else 0, token_id))
        tags = np.empty((self._layer_count, len(chain), 2), np.uint64)
        for layer in range(self._layer_count):
            tags[layer, :, 0] = np.array(chain, np.uint64) + np.uint64(_LAYER_FACTOR * layer % 2**64)
            tags[layer, :, 1] = ~tags[layer, :, 0]
        return tags


def _next_tag(previous_tag: int, token_id: int) -> int:
    return xxh3_64_intdigest(_LINK.pack(previous_tag, token_id))
