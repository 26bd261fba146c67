"""The measurements that a service makes of its targets: the times of their steps, and the activity of each client."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from specbranch.core.costs import PairModel, StepTimeModel
from specbranch.core.ngram import HistoryBudget, OutputHistory
from specbranch.service.wire.messages import OLDEST_VERSION, FrameError, OtherRows, StepRequest

_MAX_TENANTS = _MAX_CLIENTS = 1024
_MAX_NAMESPACES = 4  # of one client; ours use one
_MAX_STEP_S = 10.0  # after a longer pause between two steps the target was idle
_NO_ROWS = OtherRows(0, 0, 0)


@dataclass(slots=True)
class _Tenant:
    costs: PairModel
    answered_s: float | None = None
    reports_step_times: bool = False


@dataclass(slots=True, eq=False)
class ClientActivity:
    """The activity of one client: its steps, its namespaces, and the `PrefetchPush` messages since its last step.

    `is_resting`: the client has said that it wants no drafts until its next step.
    """

    client: bytes = b""
    steps: int = 0
    last_message_s: float = 0.0
    num_pushes: int = 0
    is_resting: bool = False
    namespaces: set[bytes] = field(default_factory=set)

    def begin_step(self, now_s: float) -> None:
        """Count a step that came at `now_s`; the client rests no longer, and no `PrefetchPush` was sent to it since."""
        self.steps += 1
        self.last_message_s = now_s
        self.num_pushes = 0
        self.is_resting = False


class Tenants:
    """Costs by namespace, activity and version by client. When full, each evicts the entry used least recently."""

    def __init__(self, draft_cost: StepTimeModel) -> None:
        self._draft_cost = draft_cost
        self._history_budget = HistoryBudget()
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._clients: OrderedDict[bytes, ClientActivity] = OrderedDict()
        self._versions: OrderedDict[bytes, int] = OrderedDict()

    def costs(self, namespace: bytes) -> PairModel:
        """Return the step times, acceptance probabilities and past answers that were learned for a namespace."""
        return self._tenant(namespace).costs

    def client(self, name: bytes) -> ClientActivity:
        """Return the activity of a client; for an unknown client, store and return a new one."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = ClientActivity(name)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(name)
        return client

    def client_in(self, name: bytes, namespace: bytes) -> ClientActivity:
        """Return the activity of a client, after adding `namespace` to the client's namespaces.

        Raise `FrameError` if these are too many: they are limited because each counts as a tenant.
        """
        client = self.client(name)
        if namespace not in client.namespaces:
            if len(client.namespaces) == _MAX_NAMESPACES:
                raise FrameError(f"a client has at most {_MAX_NAMESPACES} namespaces; connect anew for another one")
            client.namespaces.add(namespace)
        return client

    def greet(self, name: bytes, version: int) -> None:
        """Store the version of the wire that a client has agreed to."""
        self._versions[name] = version
        self._versions.move_to_end(name)
        if len(self._versions) > _MAX_CLIENTS:
            self._versions.popitem(last=False)

    def version(self, name: bytes) -> int:
        """Return the version in which a client is written to: the oldest one if it has not agreed to another."""
        return self._versions.get(name, OLDEST_VERSION)

    @property
    def clients(self) -> list[bytes]:
        """The known clients, in the order in which they last sent a step or a sequence."""
        return list(self._clients)

    def record_step(self, step: StepRequest, now_s: float) -> None:
        """Learn the time of a target's step, as the target reports it.

        For a target that reports no times, the step is taken to have begun when the last reply to its namespace left.
        """
        tenant = self._tenant(step.namespace)
        step_s = step.step_us / 1e6
        tenant.reports_step_times |= step_s > 0
        if not tenant.reports_step_times and tenant.answered_s is not None and now_s - tenant.answered_s < _MAX_STEP_S:
            step_s = now_s - tenant.answered_s
        if step_s > 0:
            others = step.beside or _NO_ROWS
            num_submitted = sum([row.num_submitted for row in step.rows]) + others.submitted
            num_committed = sum([len(row.tokens) for row in step.rows]) + others.committed
            tenant.costs.observe_step(len(step.rows) + others.rows, num_submitted, num_committed, step_s)

    def record_reply(self, namespace: bytes, now_s: float) -> None:
        """Note that a reply to a target of this namespace left at `now_s`."""
        self._tenant(namespace).answered_s = now_s

    def _tenant(self, namespace: bytes) -> _Tenant:
        tenant = self._tenants.get(namespace)
        if tenant is None:
            history = OutputHistory(self._history_budget)
            tenant = self._tenants[namespace] = _Tenant(PairModel(draft=self._draft_cost, history=history))
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(namespace)
        return tenant
