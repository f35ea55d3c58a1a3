"""A prefill and a decode worker's engines joined by two links, without Ray or router."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from types import TracebackType

from decode_worker.service import DecodeService
from kvtransfer.ladder import Ladder, LadderLimits
from kvtransfer.link import Link
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError
from pdserve.logs import logger
from pdserve.tracing import Trace
from pdserve.types import Finish, Owner, SampledToken, Ticket
from prefill_worker.service import PrefillService
from support.engines import Job, TestedEngine, new_owner

_DEADLINE_S = 60.0


class Pair:
    """A prefill and a decode worker in one process, their links over memory. Serves Jobs as a router would.

    `spare`: another prefill worker's engine, which gets the tickets of later epochs. Without it decode prefills then.
    """

    def __init__(
        self,
        prefill: TestedEngine,
        decode: TestedEngine,
        config: TransferConfig | None = None,
        spare: TestedEngine | None = None,
    ) -> None:
        self.trace = Trace()
        self.jobs: dict[Owner, Job] = {}
        self.prefill, self.decode = prefill, decode
        self.engines = [engine for engine in (prefill, decode, spare) if engine is not None]
        self._network = MemoryNetwork()
        self._config = config or TransferConfig()
        self.links: list[Link] = []
        self.prefill_reports = PrefillReports()
        self.decode_reports = DecodeReports(self)
        self.prefill_service = self._prefill_service(prefill)
        self.spare_service = self._prefill_service(spare) if spare is not None else None
        ladder = Ladder(LadderLimits.from_config(self._config))
        self.decode_service = DecodeService(
            decode, self._link(decode), self.decode_reports, ladder, SystemClock(), max_queued=64
        )

    def _prefill_service(self, engine: TestedEngine) -> PrefillService:
        link, mode = self._link(engine), self._config.mode
        return PrefillService(engine, link, self.prefill_reports, self.trace, max_queued=64, mode=mode)

    def _link(self, engine: TestedEngine) -> Link:
        transport, kv_format = self._network.transport(), engine.executor.format
        self.links.append(
            Link(transport, kv_format, b"weights", self._config, SystemClock(), self.trace, logger("test"))
        )
        return self.links[-1]

    def __enter__(self) -> Pair:
        for link in self.links:
            link.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self.links:
            link.close()

    def start(self, job: Job) -> Owner:
        """Hand a job to the decode worker, which will issue a ticket for the prefill worker."""
        owner = new_owner()
        self.jobs[owner] = job
        self.decode_service.start(owner, job.prompt, job.output, job.params, local_prefill=False)
        return owner

    def run(self, *jobs: Job) -> None:
        """Start all jobs at once and step until they have ended and all pools are whole again."""
        for job in jobs:
            self.start(job)
        self.finish(*jobs)

    def finish(self, *jobs: Job) -> None:
        self.step_until(lambda: all(job.ended for job in jobs))
        self.step_until(lambda: all(engine.idle() for engine in self.engines))
        for engine in self.engines:
            assert engine.load().blocks.leased == 0

    def step_until(self, condition: Callable[[], bool], *only: TestedEngine) -> None:
        """Step all engines, or these, until the condition holds; check their pools after every step."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            for engine in only or self.engines:
                engine.step(wait_s=0.001)
                engine.check_integrity()
            assert time.monotonic() < deadline, "it did not come to that in time"


class PrefillReports:
    """Keeps how each prefill ended, one end a sender."""

    def __init__(self) -> None:
        self.ended: dict[Owner, list[PdserveError | None]] = {}

    def terminal(self, owner: Owner, outcome: PdserveError | None) -> None:
        self.ended.setdefault(owner, []).append(outcome)


class DecodeReports:
    """Passes tickets on to the prefill worker and tokens to their job."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.tickets: list[Ticket] = []
        self.local_prefills: list[Owner] = []

    def local_prefill(self, owner: Owner, reason: str) -> None:
        self.local_prefills.append(owner)

    def ticket(self, owner: Owner, ticket: Ticket) -> None:
        job = self._pair.jobs[owner]
        self.tickets.append(ticket)
        service = self._pair.prefill_service if ticket.epoch == 1 else self._pair.spare_service
        if service is None:
            self._pair.decode_service.prefill_locally(owner)
        else:
            service.start(owner, job.prompt, job.output, job.params, ticket)

    def tokens(self, batch: list[tuple[Owner, int, ListLike[SampledToken]]]) -> None:
        for owner, first_position, tokens in batch:
            job = self._pair.jobs[owner]
            assert first_position == len(job.output) + len(job.tokens)
            job.tokens += tokens

    def terminal(self, owner: Owner, outcome: Finish | PdserveError | None) -> None:
        job = self._pair.jobs[owner]
        job.outcome = outcome
        job.ended += 1
