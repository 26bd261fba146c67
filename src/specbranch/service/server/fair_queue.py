"""Per-client queues of messages, served by decayed usage.

A client's usage is the thread's time that its messages took, with a half-life of one second. The client with the lowest
usage goes first, with one message. So a client with many messages, or with expensive ones, delays no other client for
longer than one message.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_BYTES = 16 << 20
_MAX_MESSAGES = 1 << 14
_OVERHEAD = 256  # bytes of a message in memory, in addition to its frames
_HALF_LIFE_S = 1.0
_NEWCOMER_S = 0.25  # of the thread's time: more than a target that decodes a few sequences uses
_STALE_S = 1.0  # messages that waited for longer are dropped: their client has timed out
_MAX_KEYS = 1024


class Message(NamedTuple):
    """A client's message. `user` is the public key that the client has proved to hold; empty where no keys are used."""

    client: bytes
    user: bytes
    frames: Sequence[bytes]

    @property
    def size(self) -> int:
        """Bytes of the message in memory."""
        return _OVERHEAD + sum(map(len, self.frames))


class FairQueue:
    """Bounded message queue that serves clients in turn.

    When full, it drops the newest message of the client that holds most bytes. It also drops a message if more than a
    second was spent on serving other messages while it waited; time in which the process was suspended does not count.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = _MAX_BYTES,
        max_messages: int = _MAX_MESSAGES,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        # By client: its messages, each with its size and the time spent on serving when it came.
        self._queues: dict[bytes, deque[tuple[float, int, Message]]] = {}
        self._spent_s = 0.0
        self._sizes: dict[bytes, int] = {}
        self.num_messages = 0
        self.num_bytes = 0  # of all messages
        self._usage = DecayedUsage(_HALF_LIFE_S, newcomer=_NEWCOMER_S)
        self.num_dropped = 0

    def __len__(self) -> int:
        return self.num_messages

    def push(self, message: Message) -> None:
        """Add a message; while the queue is over its limits, drop the newest message of the client with most bytes."""
        client, size = message.client, message.size
        self._queues.setdefault(client, deque()).append((self._spent_s, size, message))
        self._sizes[client] = self._sizes.get(client, 0) + size
        self.num_messages += 1
        self.num_bytes += size
        while self.num_messages > self._max_messages or self.num_bytes > self._max_bytes:
            largest = max(self._sizes, key=lambda client: self._sizes[client])
            _, size, _ = self._queues[largest].pop()
            self._remove(largest, size)
            self.num_dropped += 1

    def pop(self) -> Message | None:
        """Remove and return the next message to serve, None if there is none; drop messages that waited too long."""
        while self._queues:
            if len(self._queues) == 1:
                (client,) = self._queues
            else:
                now_s = self._clock()
                client = min(self._queues, key=lambda one: self._usage.get(one, now_s))
            since_s, size, message = self._queues[client].popleft()
            self._remove(client, size)
            if self._spent_s - since_s <= _STALE_S:
                return message
            self.num_dropped += 1
        return None

    def charge(self, client: bytes, seconds: float) -> None:
        """Add `seconds`, the time that serving a message of this client took, to its usage."""
        self._spent_s += seconds
        self._usage.add(client, seconds, self._clock())

    def _remove(self, client: bytes, size: int) -> None:
        """Subtract a message of this size, which has left the queue of its client, from the totals."""
        self.num_messages -= 1
        self.num_bytes -= size
        self._sizes[client] -= size
        if not self._queues[client]:
            del self._queues[client], self._sizes[client]


class DecayedUsage:
    """Exponentially decayed usage per key; beyond 1024 keys, the key whose usage grew least recently is dropped.

    An unknown key counts as having used `newcomer`, so that keys known to use less go before unknown ones.
    """

    def __init__(self, half_life_s: float, newcomer: float = 0.0) -> None:
        self._half_life_s = half_life_s
        self._newcomer = newcomer
        self._used: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # amount, and the time at which it was that

    def get(self, key: bytes, now_s: float) -> float:
        """Return the usage of a key, decayed to time `now_s`; `newcomer` for an unknown key."""
        amount, at_s = self._used.get(key, (self._newcomer, now_s))
        return float(amount * 0.5 ** ((now_s - at_s) / self._half_life_s))

    def add(self, key: bytes, amount: float, now_s: float) -> None:
        """Decay the usage of a key to time `now_s`, add `amount`; beyond 1024 keys, drop the least recent one."""
        self._used[key] = (self.get(key, now_s) + amount, now_s)
        self._used.move_to_end(key)
        if len(self._used) > _MAX_KEYS:
            self._used.popitem(last=False)
