"""`pdserve bench engine`: one engine in one process, without Ray, router or wire.

Decode at several batch sizes (128 tokens in, 128 out) and prefill of 1,024 tokens, for each thread count. A row's time
is the median over its steps, or over its repetitions for prefill. `bandwidth_share` is what a decode step has to read
at least (weights and KV) by the time it took and the rate of the fastest plain read of a buffer as large as the weights
with as many threads, measured in the same run.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from bench.background import EchoTraffic
from bench.machine import Limits, measure_limits
from engine.engine import SWITCH_INTERVAL_S, Engine
from engine.events import Ended, EngineEvent, Tokens
from engine.sequence import Sequence
from kernels.cpu.table import CpuKernels
from kernels.ops import AfterLayer, StepBatch
from model.build import build_model
from model.decoder import Decoder
from pdserve.config import EngineConfig
from pdserve.errors import InternalError, PdserveError
from pdserve.types import Load, Owner, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
PREFILL_TOKENS, PREFILL_REPEATS = 1024, 10
BATCHES = (1, 8, 32)
_STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class EngineRow:
    """`name`: decode or prefill. `spread_ms`: 10th and 90th percentile of step_ms.

    `bandwidth_share`: of the read rate that a batch-1 decode step uses. `outside_share`: of a decode step's time that
    is not the forward pass: planning, sampling, reporting.
    """

    name: str
    batch: int
    threads: int
    tokens_per_s: float
    step_ms: float
    spread_ms: tuple[float, float]
    bandwidth_share: float | None = None
    outside_share: float | None = None
    under_load: bool = False


def bench_engine(
    directory: Path, kernels: str, dtype: str, threads: ListLike[int] = (1, 2), under_load: bool = False
) -> list[EngineRow]:
    """All rows. `under_load`: each again while a gRPC echo keeps this process's event loop busy."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rows: list[EngineRow] = []
    for count in threads:
        config = EngineConfig(threads=count, kv_cache_mb=1024, max_step_tokens=_STEP_TOKENS)
        bench = _Bench(directory, kernels, dtype, config)
        limits = measure_limits(CpuKernels(), count, bench.decoder.weight_bytes, bench.decoder.dtype)
        rows += _rows(bench, limits, under_load=False)
        if under_load:
            with EchoTraffic():
                rows += _rows(bench, limits, under_load=True)
    return rows


def _rows(bench: _Bench, limits: Limits, under_load: bool) -> list[EngineRow]:
    rows = [_decode(bench, batch, limits, under_load) for batch in BATCHES]
    return [*rows, _prefill(bench, limits.threads, under_load)]


def _decode(bench: _Bench, batch: int, limits: Limits, under_load: bool) -> EngineRow:
    for _ in range(batch):
        bench.submit(PROMPT_TOKENS, OUTPUT_TOKENS)
    while len(bench.begun) < batch:
        bench.engine.step()
    steps: list[float] = []
    outside: list[float] = []
    with _ForwardClock(bench.decoder) as forward:
        while not bench.ended:
            forward.seconds = 0.0
            begin = time.perf_counter()
            bench.engine.step()
            steps.append(time.perf_counter() - begin)
            outside.append(1.0 - forward.seconds / steps[-1])
    bench.finish()
    median = statistics.median(steps)
    context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
    needed = bench.decoder.weight_bytes + batch * context * bench.decoder.kv_format.token_bytes
    return EngineRow(
        name="decode",
        batch=batch,
        threads=limits.threads,
        tokens_per_s=batch / median,
        step_ms=median * 1e3,
        spread_ms=_spread(steps),
        bandwidth_share=needed / median / limits.read_rate if batch == 1 else None,
        outside_share=statistics.median(outside),
        under_load=under_load,
    )


def _prefill(bench: _Bench, threads: int, under_load: bool) -> EngineRow:
    times: list[float] = []
    for _ in range(PREFILL_REPEATS):
        bench.submit(PREFILL_TOKENS, 1)
        begin = time.perf_counter()
        bench.finish()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return EngineRow(
        name="prefill",
        batch=1,
        threads=threads,
        tokens_per_s=PREFILL_TOKENS / median,
        step_ms=median * 1e3,
        spread_ms=_spread(times),
        under_load=under_load,
    )


class _ForwardClock:
    """While entered, adds up the seconds that `decoder.forward_checked` takes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._forward = decoder.forward_checked
        self.seconds = 0.0

    def __enter__(self) -> _ForwardClock:
        self._decoder.forward_checked = self._timed  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._decoder.forward_checked

    def _timed(
        self, batch: StepBatch, cache: object, after_layer: AfterLayer | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.perf_counter()
        result = self._forward(batch, cache, after_layer)
        self.seconds += time.perf_counter() - begin
        return result


class _Bench:
    """An engine and its listener: who has begun to get tokens, and who has ended."""

    def __init__(self, directory: Path, kernels: str, dtype: str, config: EngineConfig) -> None:
        built = build_model(directory, kernels, dtype, config)
        self.decoder = built.executor.decoder
        self.engine = Engine(built.executor, config, built.max_model_len, self)
        self.begun: set[Owner] = set()
        self.ended: set[Owner] = set()
        self._numbers = itertools.count()

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.begun.add(event.owner)
            elif isinstance(event, Ended):
                self.ended.add(event.owner)
                if isinstance(event.outcome, PdserveError):
                    raise InternalError(f"the benchmark's sequence failed: {event.outcome}")

    def submit(self, prompt_tokens: int, output_tokens: int) -> None:
        number = next(self._numbers)
        rng = random.Random(number)
        prompt = [rng.randrange(self.engine.limits.vocab_size) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self.engine.submit(Sequence(Owner("bench", str(number), "bench", 1), prompt, [], params))

    def finish(self) -> None:
        """Step until nothing is left, and be ready for the next measurement."""
        self.engine.step()
        while not self.engine.idle():
            self.engine.step()
        self.begun.clear()
        self.ended.clear()


def _spread(seconds: ListLike[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return tenths[0] * 1e3, tenths[-1] * 1e3
