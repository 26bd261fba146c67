"""Read the counters of a running service, by its own protocol or from a page of metrics.

Counters have their own connection, separate from that for drafts. The client waits only once for a service that does
not answer; from then on it asks without waiting, until a reply comes.
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

_MAX_LATE_S = 1.0  # a service with an older unanswered request is silent
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServiceStatus(enum.Enum):
    """How a service reacted to the last request."""

    ANSWERS = "answers"
    LATE = "late"  # no reply yet: the machine is busy, or the service has stopped answering
    SILENT = "silent"  # it is connected and does not answer
    ABSENT = "absent"  # no service listens at the address


class StatsClient:
    """Reads the counters of a draft service over its own connection. One thread at a time may use it.

    It requests the `stats` of a namespace or, if that is None, the `overview` of the service; both are None before the
    first reply. `refusal` is the service's reason for refusing the last request, None if it did not. `transport` and
    `clock` replace the client's own socket and the machine's clock.
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
        self._open_s: float | None = None  # when the oldest request without a reply was sent
        self.stats: StatsReply | None = None
        self.overview: Overview | None = None
        self.refusal: str | None = None

    def poll(self, timeout_s: float) -> ServiceStatus:
        """Request the counters, wait up to `timeout_s` for them, and return how the service reacted. Never raise.

        The reply is stored in `stats` or `overview`; both stay as they are if no reply comes in time.
        """
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
            self._store(reply)  # a late reply is still newer than what we have
        self._round += 1
        if self._is_new:
            # ZeroMQ connects in the background, so wait before the first request.
            self._channel.await_writable(timeout_s)
            self._is_new = False
        if not self._channel.send(self._request()):
            self._open_s = None
            return ServiceStatus.ABSENT
        if self._open_s is not None:
            return ServiceStatus.SILENT if now_s - self._open_s > _MAX_LATE_S else ServiceStatus.LATE
        for reply in self._channel.iter_replies(end_s):
            if self._store(reply) == self._round:
                return ServiceStatus.ANSWERS
        self._open_s = now_s
        return ServiceStatus.LATE

    def _request(self) -> StatsRequest | OverviewRequest:
        if self._namespace is None:
            return OverviewRequest(self._round)
        return StatsRequest(self._round, self._namespace)

    def _store(self, reply: Reply | None) -> int | None:
        """Store one reply, and return the round that it answers; None for a malformed message (`reply` is None)."""
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
        # A service of an older release refuses such requests, but it drafts.
        return self._round


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number on a page of Prometheus metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics_text(text: str) -> Iterator[MetricSample]:
    """Yield the samples of a page in Prometheus' text format; skip comments and malformed lines."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            yield MetricSample(name, dict(_LABEL.findall(labels or "")), float(value))
        except ValueError:
            continue
