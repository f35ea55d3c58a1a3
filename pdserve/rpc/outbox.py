"""What a session has to send and its stream has not taken yet: in order, and bounded. One thread's."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

MAX_UNSENT: Final = 10_000

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    """`limit`: how many messages wait for a peer before that one counts as too slow."""

    def __init__(self, limit: int = MAX_UNSENT) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> bool:
        """Add a message; False if there is no room."""
        if len(self._messages) >= self._limit:
            return False
        self._messages.append(message)
        return True

    def take(self) -> Message | None:
        """The next message to send, if there is one."""
        return self._messages.popleft() if self._messages else None
