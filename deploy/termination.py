"""What signals do.

In a process whose main thread is not Python's own (Ray keeps it in C++) handlers do not run. There, a signal writes a
byte into a pipe the moment it comes, whatever the main thread does; a thread of ours reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def on_sigterm(leave: Callable[[], None]) -> None:
    """Call `leave` once, on a thread of its own, when SIGTERM comes; then end the process. Main thread only."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader, leave), name="sigterm", daemon=True).start()


def exit_on_signals() -> None:
    """Ctrl-C, SIGTERM and the end of the terminal unwind the main thread, so that whatever has been started is stopped.
    Call it again whenever Ray has started: it puts handlers of its own in place."""

    def leave(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt  # Ray's calls pass it on as it is; a SystemExit they replace by one with code 1
        raise SystemExit(128 + number)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: it outlives the terminal
            signal.signal(number, leave)


def _wait(reader: int, leave: Callable[[], None]) -> None:
    while signal.SIGTERM not in os.read(reader, 64):
        pass
    try:
        leave()
    finally:
        os._exit(0)  # the main thread would not hear of it
