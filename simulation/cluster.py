"""The simulated cluster: builds what a scenario says, lets events happen one after the other, and checks after each.

    faults happen at the scenario's events -> the last one is over: the network heals -> every request has ended
        -> the late ones begin, and must succeed -> all is back at its start

Each step has a deadline in virtual time. Whatever is wrong raises Violation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pdserve.client.stream import Result
from pdserve.errors import PdserveError
from router.suspicion import CONVICT_AFTER
from simulation import checks
from simulation.client import Job, JobPlan
from simulation.eventlog import EventLog
from simulation.executor import LAYERS
from simulation.network import Death, Fabric, KvNetwork
from simulation.oracle import Oracle, Violation
from simulation.router import SimulatedRouter
from simulation.scenario import Fault, FaultKind, Scenario
from simulation.sessions import IDLE
from simulation.text import stops_within
from simulation.timeline import Event, Process, Timeline
from simulation.transfers import Transfers
from simulation.worker import SimulatedWorker, WorkerPlan

_END_S = 40.0  # after the last fault: every request has ended
_REST_S = 10.0  # after the last request: all is back at its start
_MEMBERS_S = 8.0  # after the last fault: everybody is a member again
_MAX_EVENTS = 200_000
_RESTART_S = 0.3  # of a worker that crashed over a request
_LOOK_S = 0.05  # how often a router that leaves looks whether it is done
_HIDING = ("part", "slow", "freeze", "cut")  # faults that may keep a crash from looking like one
_LOOK_EVERY = 8  # events: whether something is done costs more than an event


class Cluster:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, log: EventLog) -> None:
        self.scenario = scenario
        self.events = 0
        self.counts: Counter[str] = Counter()
        self._log = log
        self._timeline = Timeline()
        log.clock = self._timeline
        self._rng = random.Random(f"run {scenario.seed}")
        self._fabric = Fabric(self._timeline, self._rng, scenario.conditions)
        self._network = KvNetwork(self._fabric)
        self._transfers = Transfers(
            self._network, scenario.transfer.ticket_ttl_ms / 1000, scenario.sound_wire, self.counts
        )
        self._oracle = Oracle(scenario.seed, LAYERS, mixed=len({plan.colour for plan in scenario.workers}) > 1)
        self._client = Process(self._timeline, "client", "client")
        self._routers: dict[str, SimulatedRouter] = {}
        self._workers: dict[str, SimulatedWorker] = {}
        self._faults = list(scenario.faults)
        self._busy_events = 0
        self._broken = 0  # faults that are not over
        self._incarnations: Counter[str] = Counter()
        self._reports = random.Random(f"reports {scenario.seed}").random() < 0.5  # crash reports can be read
        for host in scenario.routers:
            self._start_router(host)
        for plan in scenario.workers:
            self._start_worker(plan)
        self.jobs = [self._job(plan, plan.submit_s) for plan in scenario.jobs]

    def run(self) -> None:
        """Raises Violation."""
        self._run_until(self._disturbed, _END_S, "the faults' end")
        self._faults.clear()
        if not self.scenario.calm:  # else it is the wire's own business for as long as it lasts
            self._fabric.conditions = self._fabric.conditions.healed()
            self._log.write("network", "healed")
        self._run_until(lambda: all(job.outcome is not None for job in self.jobs), _END_S, "the end of every request")
        self._serve_again()
        self._run_until(self._complete, _MEMBERS_S, "the return of every worker")
        self._serve_again()
        late = [self._job(plan, self._timeline.now()) for plan in self.scenario.late_jobs]
        self.jobs += late
        self._run_until(lambda: all(job.outcome is not None for job in late), _END_S, "the end of the late requests")
        self._run_until(lambda: not self._held(), _REST_S, "the return of everything that was held")
        self._note_counts()
        self._check_outcomes(late)
        self._check_poison()

    # The loop.

    def _run_until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = self._timeline.now() + limit_s
        while self.events % _LOOK_EVERY or not done():
            event = self._timeline.next_event()
            if event is None or self._timeline.now() > deadline or self.events > _MAX_EVENTS:
                raise Violation(f"waited {limit_s:g} s in vain for {what}: {'; '.join(self._held()) or 'all is quiet'}")
            self._happen(event)

    def _happen(self, event: Event) -> None:
        self.events += 1
        busy = event.label not in IDLE
        if busy:
            self._busy_events += 1
            while self._faults and self._faults[0].at_event <= self._busy_events:
                self._strike(self._faults.pop(0))
            if event.process is not None and not event.process.takes(event):
                return
            self._log.event(event)
        event.call()
        if event.process is not None and event.process.alive:
            event.process.check(event.label)

    def _check_worker(self, worker: SimulatedWorker, label: str) -> None:
        worker.look_for_work()
        self._transfers.check(worker.process, worker.link._exchange)
        if label not in IDLE and label != "frame":  # one that has arrived is only looked at in the link's turn
            checks.check_worker(worker, self._fabric.conditions.max_unsent)
            checks.check_credit(worker, self._workers.values())

    # Where the run stands.

    def _disturbed(self) -> bool:
        """Whether no fault is left to happen or to end. Those that find nothing going on any more do not happen."""
        idle = self._timeline.now() > 1.0 and all(job.outcome is not None for job in self.jobs)
        return self._broken == 0 and (idle or not self._faults)

    def _complete(self) -> bool:
        """Whether every worker is a member of every router, in its latest incarnation."""
        names = {worker.process.name for worker in self._workers.values()}
        return all(
            {member.info.incarnation for member in router.control.membership} == names
            for router in self._routers.values()
        )

    def _held(self) -> list[str]:
        waiting = [f"{job.plan.request_id} has not ended" for job in self.jobs if job.outcome is None]
        return waiting + [
            held for part in (*self._workers.values(), *self._routers.values()) for held in part.at_rest()
        ]

    def _check_outcomes(self, late: list[Job]) -> None:
        """What a failure may excuse without any, and once all are over, it may not."""
        undisturbed = self.jobs if self.scenario.calm else late
        for job in undisturbed:
            left = job.plan.leaves_after_s is not None
            if isinstance(job.outcome, PdserveError) and not left:
                raise Violation(f"{job.plan.request_id} failed, and nothing was wrong any more: {job.outcome!r}")
            if self.scenario.calm and isinstance(job.outcome, Result) and job.outcome.attempts != 1:
                raise Violation(f"{job.plan.request_id} took {job.outcome.attempts} attempts, and nothing was wrong")
        if self.scenario.calm:
            checks.check_calm(self.counts, self.scenario.sound_wire and not self.scenario.faults)
        if not self._oracle.mixed:
            self._check_exact()

    def _check_exact(self) -> None:
        for job in self.jobs:
            if isinstance(job.outcome, Result) and not job.outcome.exact:
                raise Violation(f"{job.plan.request_id} is said to be inexact, and all workers are alike")

    def _check_poison(self) -> None:
        """A poisonous request is stopped after three crashes in all, unless its router dies with the count."""
        hidden = sum(self.counts[kind] for kind in _HIDING)
        for job in self.jobs:
            crashes = self._oracle.poisoned[job.plan.request_id]
            if crashes > CONVICT_AFTER + job.calls - 1 and not hidden:
                raise Violation(f"{job.plan.request_id} has crashed {crashes} workers")

    def _note_counts(self) -> None:
        for worker in self._workers.values():
            worker.note_counts()
        for job in self.jobs:
            self.counts[type(job.outcome).__name__] += 1
            if isinstance(job.outcome, Result):
                self.counts["attempt made again"] += max(job.outcome.attempts - 1, 0)
                self.counts["output finished"] += len(job.outcome.outputs)
                self.counts["inexact"] += not job.outcome.exact
                self.counts["stop string"] += sum(isinstance(output.stop, str) for output in job.outcome.outputs)
                self.counts["several outputs"] += job.plan.n > 1
            self.counts["call made again"] += job.calls - 1
            self.counts["poisonous crash"] += self._oracle.poisoned[job.plan.request_id]

    # What it is made of.

    def _job(self, plan: JobPlan, submit_s: float) -> Job:
        scripts = self._oracle.write(plan.request_id, plan.prompt_count, plan.params, plan.n, plan.stop_at)
        stops = () if plan.text_stop_at is None else stops_within(scripts[0], plan.text_stop_at)
        if plan.poison_at is not None:
            self._oracle.poison[plan.request_id] = plan.poison_at
        job = Job(plan, scripts, stops, self._client, self._fabric, self._rng, self._routers)
        self._client.at(submit_s, "client calls", job.start)
        return job

    def _incarnation(self, host: str) -> str:
        self._incarnations[host] += 1
        return f"{host}#{self._incarnations[host]}"

    def _start_router(self, host: str) -> None:
        router = SimulatedRouter(host, self._incarnation(host), self._fabric, self.scenario.router, self._oracle)
        router.process.check = lambda label: checks.check_router(router)
        self._routers[host] = router

    def _start_worker(self, plan: WorkerPlan) -> None:
        worker = SimulatedWorker(
            plan,
            self._incarnation(plan.worker_id),
            self._fabric,
            self._network,
            self._oracle,
            self.scenario.engine,
            self.scenario.transfer,
            self._routers,
            self.counts,
            self._reports,
        )
        self._transfers.watch(worker.link._exchange)
        worker.process.check = partial(self._check_worker, worker)
        worker.on_poisoned = partial(self._die_poisoned, worker)
        self._workers[plan.worker_id] = worker

    # Faults.

    def _strike(self, fault: Fault) -> None:
        part = self._routers.get(fault.host) or self._workers[fault.host]
        if not part.process.alive or part.process.frozen:
            return  # one thing at a time for a process
        self.counts[fault.kind] += 1
        self._log.write(fault.host, f"FAULT {fault.kind} {fault.other} for {fault.duration_s:.3f} s")
        self._broken += 1
        match fault.kind:
            case FaultKind.CRASH:
                part.kill(fault.death)
            case FaultKind.FREEZE:
                part.process.freeze()
            case FaultKind.CUT:
                for wire in list(part.process.wires):
                    if wire.joins(fault.other):
                        wire.break_()
            case FaultKind.ERROR:
                if isinstance(part, SimulatedWorker):
                    part.executor.fail_next_step()
            case FaultKind.DRAIN:
                if isinstance(part, SimulatedWorker):
                    self._call_drain(part, fault, cancel=False)
            case FaultKind.LEAVE if isinstance(part, SimulatedWorker):
                part.leave(fault.patience_s, partial(self._worker_gone, fault, part.process))
                return
            case FaultKind.LEAVE:
                self._leave_router(part, fault, self._timeline.now() + fault.patience_s)
                return
            case FaultKind.PART:
                self._fabric.part(fault.host, fault.other, fault.duration_s)
            case FaultKind.SLOW:
                self._fabric.slow(fault.host, fault.other, 0.2, fault.duration_s)
        self._timeline.after(fault.duration_s, "fault ends", partial(self._recover, fault, part.process))

    def _recover(self, fault: Fault, process: Process) -> None:
        self._broken -= 1
        self._log.write(fault.host, f"{fault.kind} is over")
        if fault.kind is FaultKind.FREEZE and process.alive:
            process.resume()
            if fault.again_after_s:
                again = partial(self._strike_again, replace(fault, again_after_s=0.0))
                self._broken += 1
                self._timeline.after(fault.again_after_s, "fault comes again", again)
        elif fault.kind is FaultKind.DRAIN:
            self._call_drain(self._workers[fault.host], fault, cancel=True)
        elif fault.kind in (FaultKind.CRASH, FaultKind.LEAVE):
            self._start_again(fault.host)

    def _strike_again(self, fault: Fault) -> None:
        self._broken -= 1
        self._strike(fault)

    def _start_again(self, host: str) -> None:
        if host in self._routers:
            self._start_router(host)
        else:
            self._start_worker(self._workers[host].plan)

    def _call_drain(self, worker: SimulatedWorker, fault: Fault, cancel: bool) -> None:
        """As `pdserve drain`, through a router that has it."""
        router = self._routers.get(fault.other) or next(iter(self._routers.values()))
        if router.process.alive and not router.process.frozen:
            router.control.drain_worker(worker.process.name, cancel)

    def _serve_again(self) -> None:
        """What a router could not tell: an operator looks and says it again."""
        for worker in self._workers.values():
            if worker.control.load.draining:
                worker.operator(cancel=True)

    def _worker_gone(self, fault: Fault, process: Process, in_order: bool) -> None:
        """It was told to end, and has."""
        if in_order:
            self._timeline.after(fault.duration_s, "fault ends", partial(self._recover, fault, process))
        else:  # something else was faster, and starts it again
            self._broken -= 1

    def _leave_router(self, router: SimulatedRouter, fault: Fault, deadline: float) -> None:
        """As SIGTERM: it takes nothing new, and ends when nothing is left or its time is over."""
        process = router.process
        if not process.alive:  # something else was faster
            self._broken -= 1
            return
        if not process.frozen:
            router.control.drain()
            if not router.calls or self._timeline.now() > deadline:
                router.kill(Death.CLEAN)
                self._timeline.after(fault.duration_s, "fault ends", partial(self._recover, fault, process))
                return
        self._timeline.after(_LOOK_S, "leaving", lambda: self._leave_router(router, fault, deadline))

    def _die_poisoned(self, worker: SimulatedWorker) -> None:
        self._broken += 1
        self._log.write(worker.process.host, "POISONED")
        worker.kill(Death.CLEAN)
        self._timeline.after(_RESTART_S, "restart", partial(self._rise, worker.process.host))

    def _rise(self, host: str) -> None:
        self._broken -= 1
        self._start_again(host)
