"""Two network namespaces joined by a link that can be cut. This one is not part of it: tests beside one another, and
whatever else the machine does, keep their addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from support.clusters import wait_for

ADDRESSES = ("10.213.88.1", "10.213.88.2")
_INTERFACES = ("pd0", "pd1")
_PREFIX_BITS = 30
_TOOLS = ("ip", "unshare", "nsenter")


class NoNamespaces(Exception):
    """They cannot be made here, and why."""


class JoinedNamespaces:
    """`prefixes`: what a command line begins with to run in the one and in the other."""

    def __init__(self, prefixes: list[list[str]]) -> None:
        self.prefixes = prefixes

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        _run([*self.prefixes[1], "ip", "link", "set", _INTERFACES[1], "down"])

    def mend(self) -> None:
        _run([*self.prefixes[1], "ip", "link", "set", _INTERFACES[1], "up"])


@contextmanager
def joined_namespaces() -> Iterator[JoinedNamespaces]:
    """They vanish with the processes in them. Raises NoNamespaces."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NoNamespaces(f"needs {', '.join(missing)}")
    with ExitStack() as stack:
        holders = [subprocess.Popen(["unshare", "-n", "sleep", "infinity"], stderr=subprocess.PIPE) for _ in range(2)]
        for holder in holders:
            stack.enter_context(holder)
            stack.callback(holder.kill)
        for holder in holders:
            wait_for(lambda holder=holder: _is_apart(holder), "a namespace of its own")
        made = JoinedNamespaces([["nsenter", "-t", str(holder.pid), "-n"] for holder in holders])
        near, far = _INTERFACES
        pair = ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holders[1].pid)]
        _run([*made.prefixes[0], *pair])
        for prefix, interface, address in zip(made.prefixes, _INTERFACES, ADDRESSES, strict=True):
            _run([*prefix, "ip", "addr", "add", f"{address}/{_PREFIX_BITS}", "dev", interface])
            _run([*prefix, "ip", "link", "set", interface, "up"])
        yield made


def _is_apart(holder: subprocess.Popen[bytes]) -> bool:
    if holder.poll() is not None:
        assert holder.stderr is not None
        raise NoNamespaces(holder.stderr.read().decode().strip())
    return os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
