"""What a service knows of its targets: how long their steps take, and how many steps each has sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from specbranch.core.costs import PairModel, StepTimeModel
from specbranch.core.ngram import HistoryBudget, OutputHistory
from specbranch.service.wire.messages import OtherRows, StepRequest

T = TypeVar("T")
_MOST = 1024
_MAX_STEP_S = 10.0  # a longer pause between two steps is a target at rest
_PAUSE = 10  # a single step so many times as long as usual was no step alone: the machine has stood still
_NOTHING = OtherRows(0, 0, 0)


@dataclass(slots=True)
class _Tenant:
    costs: PairModel
    answered_s: float | None = None
    is_told: bool = False  # how long its steps take
    was_pause: bool = False  # the last of them, which was not learned from

    def learn(self, num_rows: int, num_submitted: int, num_committed: int, step_s: float) -> None:
        """Take in a step, unless it is far longer than those before and the first one that is."""
        usual = self.costs.target.cost
        is_pause = usual is not None and step_s > _PAUSE * usual.at(num_rows + num_submitted) > 0
        self.was_pause = is_pause and not self.was_pause
        if not self.was_pause:
            self.costs.observe_step(num_rows, num_submitted, num_committed, step_s)


class Tenants:
    """By namespace: learned costs. By client: step counters. The least recently used make way."""

    def __init__(self, draft_cost: StepTimeModel) -> None:
        self._draft_cost = draft_cost
        self._room = HistoryBudget()
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._step_counters: OrderedDict[bytes, ClientActivity] = OrderedDict()

    def costs(self, namespace: bytes) -> PairModel:
        """What was learned for a namespace."""
        return self._tenant(namespace).costs

    def step_counter(self, client: bytes) -> ClientActivity:
        """The steps of one client."""
        return _kept(self._step_counters, client, lambda: ClientActivity(client))

    @property
    def clients(self) -> list[bytes]:
        """Those that were heard of last."""
        return list(self._step_counters)

    def record_step(self, step: StepRequest, now_s: float) -> None:
        """A verdict came. A target tells how long its step took; of one that never does, the pause is known.

        The step began when the last answer left.
        """
        tenant = self._tenant(step.namespace)
        step_s = step.step_us / 1e6
        tenant.is_told |= step_s > 0
        if not tenant.is_told and tenant.answered_s is not None and now_s - tenant.answered_s < _MAX_STEP_S:
            step_s = now_s - tenant.answered_s
        if step_s > 0:
            beside = step.beside or _NOTHING
            num_submitted = sum(row.num_submitted for row in step.rows) + beside.submitted
            num_committed = sum(len(row.tokens) for row in step.rows) + beside.committed
            tenant.learn(len(step.rows) + beside.rows, num_submitted, num_committed, step_s)

    def record_reply(self, namespace: bytes, now_s: float) -> None:
        """An answer left."""
        self._tenant(namespace).answered_s = now_s

    def _tenant(self, namespace: bytes) -> _Tenant:
        return _kept(self._tenants, namespace, self._new_tenant)

    def _new_tenant(self) -> _Tenant:
        return _Tenant(PairModel(draft=self._draft_cost, history=OutputHistory(self._room)))


def _kept(store: OrderedDict[bytes, T], key: bytes, make: Callable[[], T]) -> T:
    """What a bounded store holds for a key, made if need be."""
    found = store.get(key)
    if found is None:
        found = store[key] = make()
        if len(store) > _MOST:
            store.popitem(last=False)
    store.move_to_end(key)
    return found


class ClientActivity:
    """What one target has told: how many steps, when the last, in which namespaces; and how often it was told ahead."""

    def __init__(self, client: bytes = b"") -> None:
        self.client = client
        self.steps = 0
        self.heard_s = 0.0
        self.num_ahead = 0
        self.namespaces: set[bytes] = set()
