"""What a KV transfer adds to the time to the first token, through whole clusters on the embedded model.

Each variant to compare (a transfer mode; integrity off) is a cluster of one prefill and one decode worker in a process
of its own, and all of them stand at once: requests go to them in turns, so that what else the machine does strikes all
alike. Medians over the rounds.

    python -m deploy.commands.transfer_bench '{"mode": "whole"}'      a variant: settings of [transfer]
    in   {"tokens", "seed"}        out  {} when it serves, then {"ttft_ms", "hand_over_ms"} a request
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.transfer import middle_half
from pdserve.config import TRANSFER_MODES, Config
from pdserve.errors import Unavailable

_WARM_UP_TOKENS = 64
_Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class ModeRow:
    """`hand_over_ms`: from the end of the prefill computation until all is stored and verified at the decode worker;
    `not_hidden_share`: its part of the time to the first token."""

    mode: str
    tokens: int
    ttft_ms: float
    hand_over_ms: float
    not_hidden_share: float


@dataclass(frozen=True, slots=True)
class IntegrityTtftRow:
    """Medians of pairs of requests with and without integrity."""

    tokens: int
    pairs: int
    ttft_ms: float
    added_share: float
    added_quartiles: tuple[float, float]


def bench_modes(token_counts: Sequence[int], rounds: int) -> list[ModeRow]:
    """A row for each mode and prompt length."""
    samples = _in_turns({mode: {"mode": mode} for mode in TRANSFER_MODES}, token_counts, rounds)
    return [
        ModeRow(
            mode,
            tokens,
            median(each["ttft_ms"] for each in found),
            median(each["hand_over_ms"] for each in found),
            median(each["hand_over_ms"] / each["ttft_ms"] for each in found),
        )
        for (mode, tokens), found in samples.items()
    ]


def bench_integrity_ttft(tokens: int, pairs: int) -> list[IntegrityTtftRow]:
    samples = _in_turns({"on": {}, "off": {"integrity": False}}, [tokens], pairs)
    on, off = ([each["ttft_ms"] for each in samples[variant, tokens]] for variant in ("on", "off"))
    added = [with_it / without - 1 for with_it, without in zip(on, off, strict=True)]
    return [IntegrityTtftRow(tokens, pairs, median(on), median(added), middle_half(added))]


def _in_turns(
    variants: Mapping[str, dict[str, Any]], token_counts: Sequence[int], rounds: int
) -> dict[tuple[str, int], list[_Sample]]:
    """One request of each length to each variant a round, every other round backwards; a short one each warms up."""
    samples: dict[tuple[str, int], list[_Sample]] = {(name, n): [] for n in token_counts for name in variants}
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(_cluster(settings)) for name, settings in variants.items()}
        for cluster in clusters.values():
            _ask(cluster, {"tokens": _WARM_UP_TOKENS, "seed": rounds})
        for number in range(rounds):
            for name, tokens in list(samples) if number % 2 else list(reversed(samples)):
                samples[name, tokens].append(_ask(clusters[name], {"tokens": tokens, "seed": number}))
    return samples


@contextmanager
def _cluster(settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.commands.transfer_bench", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal for us must not break its cleaning up; it ends when its input does
    )
    try:
        _answer(process)
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60.0)


def _ask(process: subprocess.Popen[str], what: dict[str, int]) -> _Sample:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> _Sample:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Unavailable("a cluster of the measurement has died; its words are above")
    sample: _Sample = json.loads(line)
    return sample


def _serve(settings: dict[str, Any]) -> None:
    """A variant's own process."""
    from deploy.cluster import LocalCluster
    from deploy.transfer_report import transfer_report
    from pdserve.client import Client

    with tempfile.TemporaryDirectory(prefix="pdb", dir="/tmp") as made:  # short: socket paths
        sections = {
            "cluster": {"prefill": 1, "decode": 1, "runtime_dir": str(Path(made) / "r")},
            "router": {"grpc_port": 0},
            "engine": {"threads": 1},
            "transfer": settings,
        }
        with LocalCluster(Config().override(sections, "bench")) as cluster, Client(cluster.grpc_address) as client:
            print(json.dumps({}), flush=True)
            for line in sys.stdin:
                what, begin_ns = json.loads(line), time.monotonic_ns()
                prompt = random.Random(what["seed"]).choices(range(1000, 20_000), k=what["tokens"])
                result = client.complete(prompt, temperature=0.0, max_tokens=2, ignore_eos=True)
                report = transfer_report(cluster, result.request_id, begin_ns)
                sample = {"ttft_ms": result.ttft_ms, "hand_over_ms": report.hand_over_ms}
                print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
