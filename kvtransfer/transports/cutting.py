"""Bounds a wait on a connection that belongs to a library and has no timeout: shuts it from outside.

A shut connection ends every wait on it with an error, in the library's own thread. The connection is found by its
other end among this process's descriptors, so that nothing of the library has to be known. Where there is no /proc,
nothing is found and nothing bounded.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"


@contextmanager
def cut_when_late(host: str, port: int, after_s: float) -> Iterator[None]:
    """While the body takes longer than `after_s`, shut what this process has connected to that address; and again
    after as long, as the library may have connected anew. A thread waits meanwhile."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(after_s):
            cut(host, port)

    threading.Thread(target=watch, name="kv-cut-when-late", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def cut(host: str, port: int) -> int:
    """Shut all connections of this process to an address; how many there were."""
    try:
        addresses = {_plain(str(found[4][0])) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return 0
    return sum(_cut_one(descriptor, addresses, port) for descriptor in descriptors)


def _cut_one(descriptor: int, addresses: set[str], port: int) -> bool:
    """What is looked at is a duplicate, so that a number which is given to something else meanwhile does no harm."""
    with suppress(OSError):
        if not os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith("socket:"):
            return False
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as duplicate:
            other = duplicate.getpeername()
            if isinstance(other, tuple) and other[1] == port and _plain(other[0]) in addresses:
                duplicate.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _plain(address: str) -> str:
    """An IPv4 address that was mapped to IPv6 is the same one."""
    with suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        return str(getattr(found, "ipv4_mapped", None) or found)
    return address
