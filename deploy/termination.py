"""SIGTERM in a process whose main thread is not Python's own: Ray keeps it in C++, where handlers do not run.

A signal writes a byte into a pipe the moment it comes, whatever the main thread does; a thread of ours reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def on_sigterm(leave: Callable[[], None]) -> None:
    """Call `leave` once, on a thread of its own, when SIGTERM comes; then end the process. Main thread only."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader, leave), name="sigterm", daemon=True).start()


def _wait(reader: int, leave: Callable[[], None]) -> None:
    while signal.SIGTERM not in os.read(reader, 64):
        pass
    try:
        leave()
    finally:
        os._exit(0)  # the main thread would not hear of it
