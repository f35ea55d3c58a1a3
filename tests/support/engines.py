"""Engines of their own in tests: jobs go in, and what came of them is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.blocks import BlockPool
from engine.engine import Engine
from engine.events import Ended, EngineEvent, EngineListener, Tokens
from engine.sequence import Sequence
from model.build import build_model
from pdserve.config import EngineConfig
from pdserve.errors import PdserveError
from pdserve.types import Finish, Load, Owner, SampledToken, SamplingParams

_numbers = itertools.count()


def new_owner() -> Owner:
    return Owner("tests", f"job-{next(_numbers)}", "router", 1)


@dataclass(slots=True)
class Job:
    """One generation: what goes in, and, once it is over, what came out."""

    prompt: ListLike[int]
    params: SamplingParams
    output: ListLike[int] = ()
    tokens: list[SampledToken] = field(default_factory=list)
    outcome: Finish | PdserveError | None = None
    ended: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def add(self, first_position: int, tokens: ListLike[SampledToken]) -> None:
        assert first_position == len(self.output) + len(self.tokens)
        self.tokens += tokens

    def end(self, outcome: Finish | PdserveError | None) -> None:
        assert not self.ended
        self.outcome = outcome
        self.ended += 1


class TestedEngine(Engine):
    """An engine with a listener that keeps all it hears and gives jobs what is theirs. `listener` is told as well."""

    __test__ = False

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        built = build_model(directory, "auto", "auto", config)
        self.executor = built.executor
        self.pool = BlockPool(self.executor.capacity.block_count, self.executor.capacity.block_tokens)
        self.jobs: dict[Owner, Job] = {}
        self.events: list[EngineEvent] = []
        self.listener: EngineListener | None = None
        super().__init__(built.executor, config, built.max_model_len, self, self.pool)

    def start(self, job: Job, owner: Owner | None = None, **settings: Any) -> Sequence:
        """Submit a job; `settings` are the sequence's."""
        owner = owner or new_owner()
        self.jobs[owner] = job
        sequence = Sequence(owner, job.prompt, job.output, job.params, **settings)
        self.submit(sequence)
        return sequence

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        self.events += events
        for event in events:
            job = self.jobs.get(event.owner)
            if job is not None and isinstance(event, Tokens):
                job.add(event.first_position, event.tokens)
            elif job is not None and isinstance(event, Ended):
                job.end(event.outcome)
        if self.listener is not None:
            self.listener.on_engine(events, load)


def make_engine(directory: Path, **settings: int) -> TestedEngine:
    """An engine with one thread and a small pool, unless `settings` of EngineConfig say otherwise."""
    return TestedEngine(directory, EngineConfig(**{"threads": 1, "kv_cache_mb": 8, "max_step_tokens": 64, **settings}))


def run(engine: TestedEngine, *jobs: Job) -> None:
    """Submit all jobs at once and step until they have ended; check the pool after every step."""
    for job in jobs:
        engine.start(job)
    finish(engine, *jobs)
    assert engine.idle()


def finish(engine: TestedEngine, *jobs: Job) -> None:
    """Step until all jobs have ended; check the pool after every step."""
    while not all(job.ended for job in jobs):
        assert engine.step(), "nothing to do, and a job has not ended"
        engine.check_integrity()
    assert engine.load().blocks.leased == 0
