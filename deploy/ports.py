"""Holds a router's ports for as long as its cluster runs, so that a restarted router finds them free."""

from __future__ import annotations

import socket

from pdserve.errors import ConfigError


class PortReservation:
    """A bound socket that does not listen. The router binds the same port beside it (SO_REUSEPORT) and listens."""

    def __init__(self, host: str, port: int, setting: str) -> None:
        """`port` 0: any free one. Raises ConfigError naming `setting` where the port is taken."""
        with socket.socket() as probe:  # without SO_REUSEPORT, which would also bind beside another cluster's router
            self._bind(probe, host, port, setting)
            free = probe.getsockname()[1]
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._bind(self._socket, host, free, setting)
        self.port: int = free

    def release(self) -> None:
        self._socket.close()

    @staticmethod
    def _bind(bound: socket.socket, host: str, port: int, setting: str) -> None:
        try:
            bound.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{setting} = {port}: cannot listen at {host}:{port}: {error.strerror}; "
                "choose another port, or 0 for any free one"
            ) from None
