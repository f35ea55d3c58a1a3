"""A prefill and a decode worker's engines and controls joined by two links, without Ray or router."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from kvtransfer.link import Link
from kvtransfer.transports.base import Transport
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError
from pdserve.logs import logger
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.tracing import Trace
from pdserve.types import Finish, Owner, Ticket
from support import commands
from support.controls import HandTurns, TestedControl
from support.engines import Job, TestedEngine, new_owner

_DEADLINE_S = 60.0


class Member:
    """One worker. Its control takes turns with its engine, on the test's thread."""

    def __init__(
        self,
        engine: TestedEngine,
        transport: Transport,
        config: TransferConfig,
        trace: Trace,
        on_message: Callable[[pb.WorkerMessage], None],
    ) -> None:
        kv_format = engine.executor.format
        self.engine = engine
        self.link = Link(transport, kv_format, b"weights", config, SystemClock(), trace, logger("test"))
        self.turns = HandTurns()
        tested = TestedControl(
            engine, self.link, kv_format.layer_count, on_message, turns=self.turns, config=config, trace=trace
        )
        self.tell = tested.tell
        engine.listener = tested.control

    def step(self, wait_s: float = 0.0) -> None:
        """One of the engine's, and what the control has to do before and after it."""
        self.turns.take()
        self.engine.step(wait_s)
        self.turns.take()


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
        self.tickets: list[Ticket] = []
        self.local_prefills: list[Owner] = []
        self.prefill_ends: dict[Owner, list[Finish | PdserveError | None]] = {}  # one a sender
        self.prefill, self.decode = prefill, decode
        network, config = MemoryNetwork(), config or TransferConfig()

        def member(engine: TestedEngine, on_message: Callable[[pb.WorkerMessage], None]) -> Member:
            return Member(engine, network.transport(), config, self.trace, on_message)

        self.prefill_worker = member(prefill, self._on_prefill)
        self.spare_worker = None if spare is None else member(spare, self._on_prefill)
        self.decode_worker = member(decode, self._on_decode)
        workers = (self.prefill_worker, self.decode_worker, self.spare_worker)
        self.workers = [worker for worker in workers if worker is not None]

    def __enter__(self) -> Pair:
        for worker in self.workers:
            worker.link.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.link.close()

    def start(self, job: Job) -> Owner:
        """Hand a job to the decode worker, which will issue a ticket for the prefill worker."""
        owner = new_owner()
        self.jobs[owner] = job
        self.decode_worker.tell(commands.start_decode(owner, job.prompt, job.output, job.params))
        return owner

    def run(self, *jobs: Job) -> None:
        """Start all jobs at once and step until they have ended and all pools are whole again."""
        for job in jobs:
            self.start(job)
        self.finish(*jobs)

    def finish(self, *jobs: Job) -> None:
        self.step_until(lambda: all(job.ended for job in jobs))
        self.step_until(lambda: all(worker.engine.idle() for worker in self.workers))
        for worker in self.workers:
            assert worker.engine.load().blocks.leased == 0

    def step_until(self, condition: Callable[[], bool], *only: Member) -> None:
        """Step all workers, or these, until the condition holds; check their pools after every step."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            for worker in only or self.workers:
                worker.step(wait_s=0.001)
                worker.engine.check_integrity()
            assert time.monotonic() < deadline, "it did not come to that in time"

    # What a router does.

    def on_ticket(self, owner: Owner, ticket: Ticket) -> None:
        """Pass a ticket on to the prefill worker whose turn it is."""
        job = self.jobs[owner]
        worker = self.prefill_worker if ticket.epoch == 1 else self.spare_worker
        if worker is None:
            self.decode_worker.turns.post(partial(self.decode_worker.tell, commands.prefill_locally(owner)))
        else:
            worker.tell(commands.start_prefill(owner, job.prompt, job.output, job.params, ticket))

    def _on_prefill(self, message: pb.WorkerMessage) -> None:
        terminal = message.terminal
        ends = self.prefill_ends.setdefault(convert.owner_from_proto(terminal.owner), [])
        ends.append(convert.terminal_from_proto(terminal))

    def _on_decode(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "ticket":
                ticket = convert.ticket_from_proto(message.ticket)
                self.tickets.append(ticket)
                self.on_ticket(convert.owner_from_proto(message.ticket.owner), ticket)
            case "local_prefill":
                self.local_prefills.append(convert.owner_from_proto(message.local_prefill.owner))
            case "tokens":
                for item in message.tokens.batch:
                    job = self.jobs[convert.owner_from_proto(item.owner)]
                    job.add(item.first_position, [convert.token_from_proto(token) for token in item.tokens])
            case "terminal":
                job = self.jobs[convert.owner_from_proto(message.terminal.owner)]
                job.end(convert.terminal_from_proto(message.terminal))
