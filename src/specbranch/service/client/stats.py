"""Counters of a running service, by its own protocol or from a page of metrics.

A connection of its own, apart from the one that drafts come through. A service that does not answer is waited for once;
from then on it is asked, but not waited for, until an answer comes.
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


_PATIENCE_S = 1.0  # a question that stays open for longer is met with silence
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServiceStatus(enum.Enum):
    """How a service was found when it was last asked."""

    ANSWERS = "answers"
    LATE = "late"  # no answer yet: a busy machine, or the beginning of a silence
    SILENT = "silent"  # it is connected and says nothing
    ABSENT = "absent"  # nobody listens


class StatsClient:
    """One connection to a draft service. One thread at a time may use it.

    It asks for the `stats` of one namespace or, without one, for the `overview` of the service. `refusal` is why the
    last question was not answered by either. `transport` and `clock` are as those of `DraftClient`.
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
        """Bring the figures up to date if that can be done in time; they stay as they were if not."""
        try:
            return self._poll(timeout_s)
        except Exception:
            log.exception("the draft service could not be asked for its figures")
            return ServiceStatus.ABSENT

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def _poll(self, timeout_s: float) -> ServiceStatus:
        if not self._owner.is_current():
            return ServiceStatus.ABSENT
        now_s = self._clock()
        end_s = now_s + timeout_s
        for reply in self._channel.receive(end_s):
            self._take(reply)  # an answer that came too late; it still is the newest we have
        self._round += 1
        if self._is_new:
            # Connecting happens in the background; the first question must not come too early.
            self._channel.await_writable(timeout_s)
            self._is_new = False
        if not self._channel.send(self._question()):
            self._open_s = None
            return ServiceStatus.ABSENT
        if self._open_s is not None:
            return ServiceStatus.SILENT if now_s - self._open_s > _PATIENCE_S else ServiceStatus.LATE
        for reply in self._channel.iter_replies(end_s):
            if self._take(reply) == self._round:
                return ServiceStatus.ANSWERS
        self._open_s = now_s
        return ServiceStatus.LATE

    def _question(self) -> StatsRequest | OverviewRequest:
        if self._namespace is None:
            return OverviewRequest(self._round)
        return StatsRequest(self._round, self._namespace)

    def _take(self, reply: Reply | None) -> int | None:
        """Take in one message; the round that it answers, None if it is no answer."""
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
        # A service of an older release knows no reports. It is there, though, and drafts.
        return self._round


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics_text(text: str) -> Iterator[MetricSample]:
    """The samples of a page; comments and what is no sample are left out."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            yield MetricSample(name, dict(_LABEL.findall(labels or "")), float(value))
        except ValueError:
            continue
