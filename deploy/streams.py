"""The standard streams of a command: what is the command's own goes to stdout, all else to stderr.

Libraries write where they like, from C as well, and processes that they start inherit descriptors. So descriptor 1 is
led to stderr, and `sys.stdout` alone still reaches the real one. Where even Python code of others may print,
`libraries_silent` leads `sys.stdout` away too and gives the real one to who has the right to write.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def take_over() -> None:
    """At the start of a command. A stream that cannot show a character shows another in its place; one that is closed
    is as good as /dev/null."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: whatever is opened next would be taken for it
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None or sys.stderr is None:
        sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
        sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    encoding = sys.stdout.encoding
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "wb", buffering=io.DEFAULT_BUFFER_SIZE)
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(own, encoding=encoding, errors="replace", line_buffering=own.isatty())


def print_json(value: Any, *, file: TextIO | None = None, indent: int | None = 2) -> None:
    """One JSON value on a line, or several lines, of its own. ASCII only: right in every encoding. JSON has no numbers
    that are not finite: null."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False), file=file, flush=True)


@contextlib.contextmanager
def libraries_silent() -> Iterator[TextIO]:
    """Meanwhile whoever prints, prints to stderr; who has what this gives, writes to stdout."""
    own = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield own


def finish() -> bool:
    """Write out what is still held; False where nobody reads it any more, or there is no room."""
    try:
        sys.stdout.flush()
    except OSError:
        discard()
        return False
    return True


def discard() -> None:
    """What stdout still holds is lost: without this, Python would complain of it at its very end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
