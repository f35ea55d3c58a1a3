"""What is right: every request's whole token streams, and the KV of each of their tokens.

The KV of a token is a pair of 64-bit tags that hang together: each is a hash of the one before it and the token, so a
tag stands for the whole prefix and for nothing else. A prefix's logits are a hash of its last tag, so they are known
wherever the prefix is. What is drawn from them is said by the product's own adjustment and sampler, over the whole
request in one go: there is no border in it that a failover could have moved.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from xxhash import xxh3_64_intdigest

from model.adjustment import adjusted, needs_adjustment
from model.sampler import sample
from pdserve.types import Finish, Owner, SampledToken, SamplingParams

VOCAB_SIZE = 512
EOS = 2
COLOUR = np.uint64(1)  # the bit of a V tag that says which kind of worker computed it
FIRST_TOKEN = 16  # those below are special
OFTEN_SAID = 48  # tokens that prompts and outputs are made of, so that penalties have something to do
_LAYER_FACTOR = 0x9E3779B97F4A7C15
_LINK = struct.Struct("<QI")
_TAG = struct.Struct("<Q")


class Violation(BaseException):
    """Something happened that must not. Not an Exception: no supervisor of the product may swallow it."""


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One output of a request as it must go. `tags` is uint64 [layer, token, K or V], the colour bit of V set; `finish`
    is the end without interference."""

    request_id: str
    output: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[SampledToken, ...]
    output_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish: Finish
    tags: np.ndarray


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which kinds of workers (colours) had computed the KV of the prompt and of the output before a token."""

    prompt: frozenset[int]
    output: frozenset[int]


class Oracle:
    """All scripts of one run. `mixed`: there are workers of two kinds, and it matters who computed what."""

    def __init__(self, seed: int, layer_count: int, mixed: bool = False) -> None:
        self.mixed = mixed
        self.poison: dict[str, int] = {}  # request id -> the position whose computing crashes a worker
        self.poisoned: Counter[str] = Counter()  # workers that a request has crashed
        self._seed = seed
        self._layer_count = layer_count
        self._scripts: dict[tuple[str, int], Script] = {}
        self._places: dict[int, tuple[Script, int]] = {}  # by the K tag of layer 0
        self._prompts = 0
        self._provenance: dict[tuple[Owner, int], Provenance] = {}

    def write(
        self, request_id: str, prompt_count: int, params: SamplingParams, n: int = 1, stop_at: int | None = None
    ) -> tuple[Script, ...]:
        """Decide everything about a request with a prompt of this length, by output. `stop_at`: the first output's
        token of this number, if nothing else changes, is one of its stop ids."""
        rng = random.Random(f"{self._seed}/{request_id}")
        first = FIRST_TOKEN + self._prompts  # no two prompts begin alike: a prefix is one request's
        self._prompts += 1
        said = range(FIRST_TOKEN, FIRST_TOKEN + OFTEN_SAID)
        prompt = (first, *(rng.choice(said) for _ in range(prompt_count - 1)))
        if stop_at is not None:
            tokens, _ = _stream(prompt, params, 0)
            params = replace(params, stop_token_ids=(tokens[min(stop_at, len(tokens) - 1)].token_id,))
        return tuple(self._script(request_id, output, prompt, params) for output in range(n))

    def script(self, request_id: str, output: int) -> Script:
        return self._scripts[request_id, output]

    def at(self, previous_tag: int, token_ids: Sequence[int]) -> tuple[Script, int]:
        """Whose tokens these are, and the last one's position, if they follow the prefix of `previous_tag` (0: none).
        Outputs that have gone the same way so far may stand for each other."""
        tag = previous_tag
        for token_id in token_ids:
            tag = _next_tag(tag, token_id)
        place = self._places.get(tag)
        if place is None:
            raise Violation(f"tokens {token_ids} after tag {previous_tag:016x} are nobody's: KV of something else")
        return place

    def note(self, owner: Owner, output_position: int, provenance: Provenance) -> None:
        """Remember what the KV was computed by that this token of an attempt was sampled from."""
        self._provenance[owner, output_position] = provenance

    def provenance(self, owner: Owner, output_position: int) -> Provenance | None:
        return self._provenance.get((owner, output_position))

    def _script(self, request_id: str, output: int, prompt: tuple[int, ...], params: SamplingParams) -> Script:
        tokens, finish = _stream(prompt, params, output)
        output_ids = tuple(token.token_id for token in tokens)
        tags = self._tags(prompt + output_ids)
        script = Script(request_id, output, prompt, params, tokens, output_ids, prompt + output_ids, finish, tags)
        self._scripts[request_id, output] = script
        for position, tag in enumerate(tags[0, :, 0].tolist()):
            other, known_position = self._places.setdefault(tag, (script, position))
            if other.request_id != request_id or known_position != position:
                raise AssertionError("two prefixes share a tag")
        return script

    def _tags(self, token_ids: tuple[int, ...]) -> np.ndarray:
        chain: list[int] = []
        for token_id in token_ids:
            chain.append(_next_tag(chain[-1] if chain else 0, token_id))
        tags = np.empty((self._layer_count, len(chain), 2), np.uint64)
        for layer in range(self._layer_count):
            tags[layer, :, 0] = np.array(chain, np.uint64) + np.uint64(_LAYER_FACTOR * layer % 2**64)
            tags[layer, :, 1] = ~tags[layer, :, 0] | COLOUR
        return tags


def logits_after(tag: int) -> np.ndarray:
    """The model's logits, fp32 [V], after the prefix of this K tag of layer 0: four likely tokens, now and then EOS."""
    word = xxh3_64_intdigest(_TAG.pack(tag))
    logits = np.zeros(VOCAB_SIZE, np.float32)
    for rank in (3, 2, 1, 0):
        logits[FIRST_TOKEN + (word >> 16 * rank & 0xFFFF) % OFTEN_SAID] = 12.0 - 0.5 * rank
    if word % 61 == 0:
        logits[EOS] = 13.0
    return logits


def _stream(prompt: tuple[int, ...], params: SamplingParams, output: int) -> tuple[tuple[SampledToken, ...], Finish]:
    """The tokens of an output, and its end."""
    tag = 0
    for token_id in prompt:
        tag = _next_tag(tag, token_id)
    tokens: list[SampledToken] = []
    ids: list[int] = []
    finish: Finish | None = None
    while finish is None:
        logits = logits_after(tag)
        drawn_from = adjusted(logits, params, prompt, ids, (EOS,)) if needs_adjustment(params, len(ids)) else None
        tokens.append(sample(logits, params, output, len(prompt) + len(ids), drawn_from))
        ids.append(tokens[-1].token_id)
        tag = _next_tag(tag, ids[-1])
        finish = params.end_of(ids, (EOS,))
    return tuple(tokens), finish


def _next_tag(previous_tag: int, token_id: int) -> int:
    return xxh3_64_intdigest(_LINK.pack(previous_tag, token_id))
