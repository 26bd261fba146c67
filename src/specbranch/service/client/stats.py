"""Counters of a running service, by its own protocol or from a page of metrics.

The client has a connection of its own, apart from the one of the drafts. It waits once for a service that does not
reply; from then on it asks without waiting, until a reply comes.
"""

from __future__ import annotations

import enum
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from specbranch.service.client.transport import MessageChannel, OwnerProcess, Transport, ZmqTransport
from specbranch.service.wire.addresses import ClientKeys
from specbranch.service.wire.messages import ErrorReply, Overview, OverviewRequest, Reply, StatsReply, StatsRequest

log = logging.getLogger(__name__)


_PATIENCE_S = 1.0  # a service that leaves a question open for longer is silent
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServiceStatus(enum.Enum):
    """How a service behaved when it was last asked."""

    ANSWERS = "answers"
    LATE = "late"  # no reply yet: a busy machine, or the beginning of a silence
    SILENT = "silent"  # it is connected and does not reply
    ABSENT = "absent"  # no service listens


class StatsClient:
    """One connection to a draft service. One thread at a time may use it.

    It asks for the `stats` of one namespace or, without one, for the `overview` of the service. `refusal` is why the
    service sent neither last time. `transport` and `clock` are as those of `DraftClient`.
    """

    def __init__(
        self,
        address: str,
        namespace: bytes | None,
        keys: ClientKeys | None = None,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._owner = OwnerProcess()
        self._channel = MessageChannel(transport or ZmqTransport(address, keys), clock)
        self._round = 0
        self._is_new = True
        self._open_s: float | None = None  # when the oldest question was asked that is still open
        self.stats: StatsReply | None = None
        self.overview: Overview | None = None
        self.refusal: str | None = None

    def poll(self, timeout_s: float) -> ServiceStatus:
        """Update the counters if the service replies in time, and return how it behaved. Never raise."""
        try:
            return self._poll(timeout_s)
        except Exception:
            log.exception("the draft service could not be asked for its counters; they stay as they were")
            return ServiceStatus.ABSENT

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _poll(self, timeout_s: float) -> ServiceStatus:
        if not self._owner.is_current():
            return ServiceStatus.ABSENT
        now_s = self._clock()
        end_s = now_s + timeout_s
        for reply in self._channel.receive(end_s):
            self._update(reply)  # a reply that came too late; it still is the newest one
        self._round += 1
        if self._is_new:
            # The socket connects in the background; the first question must not come too early.
            self._channel.await_writable(timeout_s)
            self._is_new = False
        if not self._channel.send(self._question()):
            self._open_s = None
            return ServiceStatus.ABSENT
        if self._open_s is not None:
            return ServiceStatus.SILENT if now_s - self._open_s > _PATIENCE_S else ServiceStatus.LATE
        for reply in self._channel.iter_replies(end_s):
            if self._update(reply) == self._round:
                return ServiceStatus.ANSWERS
        self._open_s = now_s
        return ServiceStatus.LATE

    def _question(self) -> StatsRequest | OverviewRequest:
        if self._namespace is None:
            return OverviewRequest(self._round)
        return StatsRequest(self._round, self._namespace)

    def _update(self, reply: Reply | None) -> int | None:
        """Update the counters by one message; return the round that it replies to, None if it is no reply."""
        self._open_s = None
        if reply is None:
            return None
        self.refusal = reply.reason if isinstance(reply, ErrorReply) else None
        if isinstance(reply, StatsReply):
            self.stats = reply
            return reply.round
        if isinstance(reply, Overview):
            self.overview = reply
            return reply.round
        # A service of an older release does not know the question, but it is there and drafts.
        return self._round


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics_text(text: str) -> Iterator[MetricSample]:
    """Yield the samples of a page of metrics; skip comments and lines that are no sample."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            yield MetricSample(name, dict(_LABEL.findall(labels or "")), float(value))
        except ValueError:
            continue
