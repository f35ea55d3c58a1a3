"""The thread that owns a worker's control: an event loop, which also carries the sessions' streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pdserve import logs

_log = logs.logger("worker")

_CANCEL_TIMEOUT_S = 1.0  # for what a cancelled task still has to do

_Result = TypeVar("_Result")


class ControlLoop:
    """`Turns` for a control. `broken`: what to do when a call into it has failed: its state is not to be trusted."""

    def __init__(self, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread. What is posted afterwards is dropped: nobody is left to tell."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    # Any thread.

    def post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.turn, call)

    def run(self, coroutine: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
        """Wait for a coroutine that runs there. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def ask(self, question: Callable[[], _Result], timeout_s: float = 5.0) -> _Result:
        """What `question` answers there, between two turns."""

        async def answer() -> _Result:
            return question()

        return self.run(answer(), timeout_s)

    # Its own thread.

    def turn(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - a worker whose control is broken must not look alive
            _log.exception("the control failed")
            self._broken()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, partial(self.turn, call))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)  # of streams that did not end in time
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_TIMEOUT_S))
        finally:
            self._loop.close()
