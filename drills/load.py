"""Seeded requests, and a recording of what came back for each.

The same seed makes the same requests. A recording holds everything a client sees, with the times at which it saw it;
it can be read while it grows. Knows no fault and gives no verdict.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from drills.verdict import Wish
from pdserve.client import Client, Delta, GenerateOptions, Result, TokenLogprob
from pdserve.clock import SystemClock
from pdserve.errors import Cancelled, PdserveError

_CLOCK = SystemClock()
_TEXT = (
    "the lighthouse keeper walked along a cold shore and found an old bottle with paper in it he read by lamp about "
    "ships that never came home while wind sang over stones where gulls had slept before winter"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load. `options` as Client.generate takes them, with a seed wherever chance decides."""

    name: str
    prompt: str
    options: GenerateOptions
    wish: Wish = Wish.COMPLETE
    cancel_after: int = 0  # tokens, where it is the drill that cancels it; 0: as soon as it is accepted
    held: bool = False  # sent when it is released, not with the others

    @property
    def key(self) -> str:
        """Equal for requests whose undisturbed answers are equal."""
        return repr((self.prompt, sorted(self.options.items())))


@dataclass(slots=True)
class Output:
    """One sample of an answer as it came: ids, text, logprobs, and when how many tokens arrived."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (monotonic seconds, tokens)

    def add(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)
        if delta.token_ids:
            self.arrivals.append((delta.arrived_s, len(delta.token_ids)))


@dataclass(slots=True)
class Recording:
    """What one request's client saw. `outputs` by output index; `result` or `error` is its terminal event."""

    ask: Ask
    request_id: str
    router: int  # the one that is asked first
    started_s: float = 0.0
    ended_s: float | None = None
    outputs: dict[int, Output] = field(default_factory=dict)
    result: Result | None = None
    error: PdserveError | None = None

    @property
    def token_count(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs.values())

    @property
    def live(self) -> bool:
        return bool(self.started_s) and self.ended_s is None


class LoadRun:
    """Requests being sent, a thread and a client each, spread over the routers. Use as: start, look, wait."""

    def __init__(
        self, addresses: Sequence[str], asks: Iterable[Ask], tag: str, timeout_s: float, at_once: int | None = None
    ) -> None:
        """`tag` makes the request ids unique; `timeout_s` is the clients' deadline; of the requests not held back, at
        most `at_once` are in flight."""
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._stopped = threading.Event()
        self.recordings = [
            Recording(ask, f"drill-{tag}-{ask.name}", number % len(self._addresses)) for number, ask in enumerate(asks)
        ]
        self._turns = threading.Semaphore(at_once or len(self.recordings))
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=recording.request_id, daemon=True)
            for number, recording in enumerate(self.recordings)
        ]

    def start(self) -> LoadRun:
        """Send all but those held back."""
        for recording, thread in zip(self.recordings, self._threads, strict=True):
            if not recording.ask.held:
                thread.start()
        return self

    def release(self, recording: Recording) -> None:
        """Send one that was held back."""
        self._threads[self.recordings.index(recording)].start()

    def wait(self) -> list[Recording]:
        """Until every request has ended, which the clients' deadline bounds; those never released are left out."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        return [recording for recording in self.recordings if recording.started_s]

    def stop(self) -> None:
        """Send no more; what is in flight goes on."""
        self._stopped.set()

    @property
    def live(self) -> int:
        """How many are in flight."""
        return sum(recording.live for recording in self.recordings)

    def wait_tokens(self, recordings: Iterable[Recording], count: int, timeout_s: float) -> bool:
        """Until each has at least `count` tokens or has ended; False if that takes too long."""
        wanted = list(recordings)
        with self._lock:
            return self._lock.wait_for(
                lambda: all(each.token_count >= count or each.ended_s is not None for each in wanted), timeout_s
            )

    def _serve(self, number: int) -> None:
        recording = self.recordings[number]
        with self._turns:
            if not self._stopped.is_set():
                self._send(recording)

    def _send(self, recording: Recording) -> None:
        recording.started_s = _CLOCK.now()
        turn = recording.router
        with Client(self._addresses[turn:] + self._addresses[:turn]) as client:
            try:
                recording.result = self._read(client, recording)
            except PdserveError as error:
                recording.error = error
        with self._lock:
            recording.ended_s = _CLOCK.now()
            self._lock.notify_all()

    def _read(self, client: Client, recording: Recording) -> Result | None:
        ask = recording.ask
        options: GenerateOptions = {**ask.options, "request_id": recording.request_id}
        stream = client.generate(ask.prompt, timeout_s=self._timeout_s, **options)
        cancelling = ask.wish is Wish.CANCELLED
        if cancelling and not ask.cancel_after and stream.started:
            stream.cancel()
        for delta in stream:
            with self._lock:
                recording.outputs.setdefault(delta.output_index, Output()).add(delta)
                self._lock.notify_all()
            if cancelling and recording.token_count >= ask.cancel_after:
                stream.cancel()
                raise Cancelled("the drill cancelled it")
        return stream.result


@dataclass(frozen=True, slots=True)
class Scale:
    """How big a load's requests are, for the model at hand: a drill needs time to hit its phases."""

    output_tokens: int = 96
    probe_words: int = 400
    probe_tokens: int = 32


def background(seed: int, count: int, scale: Scale) -> list[Ask]:
    """Short requests of every kind: greedy, sampled, with logprobs, penalties, a stop string, two outputs; of several
    lengths."""
    rng = random.Random(f"background/{seed}")
    return [_background_ask(rng, number, scale) for number in range(count)]


def probe(seed: int, name: str, scale: Scale) -> Ask:
    """One long prompt, sampled: its prefill and its KV transfer take long enough to be hit."""
    rng = random.Random(f"probe/{seed}/{name}")
    options: GenerateOptions = {
        "temperature": 0.8,
        "seed": rng.getrandbits(63),
        "max_tokens": scale.probe_tokens,
        "ignore_eos": True,
        "logprobs": 1,
    }
    return Ask(name, words(rng, scale.probe_words), options, held=True)


def cancelled(asks: Iterable[Ask], seed: int, share: float) -> list[Ask]:
    """The same asks, a share of which goes away at some moment: at once, or after some tokens."""
    rng = random.Random(f"cancel/{seed}")

    def one(ask: Ask) -> Ask:
        if rng.random() >= share:
            return ask
        most = (ask.options.get("max_tokens") or 2) - 1
        return replace(ask, wish=Wish.CANCELLED, cancel_after=rng.choice([0, rng.randint(1, most)]))

    return [one(ask) for ask in asks]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _background_ask(rng: random.Random, number: int, scale: Scale) -> Ask:
    length = (6, 40, 12, 90, 20)[number % 5]
    options: GenerateOptions = {"max_tokens": rng.randint(scale.output_tokens * 3 // 4, scale.output_tokens)}
    match number % 5:
        case 0:
            kind = "greedy"
            options |= {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        case 1:
            kind = "sampled"
            options |= {"temperature": 0.9, "seed": rng.getrandbits(63), "ignore_eos": True, "logprobs": 2}
        case 2:
            kind = "stop"  # not before half of it, so that there is a stream to disturb
            half = scale.output_tokens // 2
            options |= {"temperature": 0.0, "stop": [" the", " and"], "min_tokens": half, "ignore_eos": True}
        case 3:
            kind = "several"  # outputs, which share the prompt's blocks
            options |= {"temperature": 0.8, "seed": rng.getrandbits(63), "ignore_eos": True, "n": 2}
        case _:
            kind = "penalties"
            penalties: GenerateOptions = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
            options |= {"temperature": 0.7, "top_p": 0.9, "seed": rng.getrandbits(63), "ignore_eos": True}
            options |= penalties
    return Ask(f"{kind}-{number}", words(rng, length), options)
