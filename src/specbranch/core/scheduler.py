"""Which rows run in the next draft step: one policy for the service and for the simulator.

Rows of all sessions compete: first those that a target waits for, then those whose tokens the target emits with the
highest probability. Sessions that are still in prefill share one chunk of prefill tokens in a step, so that other
sessions go on drafting meanwhile.

Tenants share a step: each gets as many rows as the tenant that requests fewest. Further rows and prefill tokens may at
most double the time of the step. So no tenant's large request delays the drafts of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specbranch.core.costs import StepCost
from specbranch.core.node import Node
from specbranch.core.round import Round

K = TypeVar("K")
MIN_PREFILL_CHUNK = 8  # tokens to prefill: fewer take as long
_CHUNK_DIVISOR = 4  # divides the prefill chunk of a step in which other sessions draft


@dataclass(slots=True, kw_only=True)
class RowRequest(Generic[K]):
    """The nodes after which one session needs distributions from the next step, and those that `select_rows` grants."""

    session: K
    nodes: Sequence[Node]
    priorities: Sequence[float]  # one for each node
    is_target_waiting: bool = False  # a target waits for this session
    num_unprefilled: int = 0  # committed tokens that the draft has not prefilled yet
    round_index: int = 0  # of the session when the request was made
    tenant: Hashable = None  # the owner of the session
    num_prefilled: float = 0.0  # tokens that were prefilled for its tenant; old ones may count less
    granted: list[Node] = field(default_factory=list)

    @property
    def is_in_prefill(self) -> bool:
        """Whether the draft must prefill more than the newest token before it can draft."""
        return self.num_unprefilled > 1


@dataclass(frozen=True, slots=True)
class Schedule(Generic[K]):
    """The requests that take part in the next step, and the most tokens that each of them may prefill in it."""

    requests: list[RowRequest[K]]
    prefill_chunk: int


def request_rows(
    session: K,
    round: Round,
    nodes: Sequence[Node],
    is_awaited: bool,
    num_unread: int = 0,
    tenant: Hashable = None,
    num_read: float = 0.0,
) -> RowRequest[K]:
    """Return a session's request to compute the distributions after `nodes`, prioritized by their path probabilities.

    `is_awaited`: a target waits for the session; this adds 1 to each priority. `num_unread` is the number of committed
    tokens that the draft has not prefilled yet. `num_read` is the number of tokens prefilled for `tenant`, the owner of
    the session; the caller may weight old ones less.
    """
    lead = 1.0 if is_awaited else 0.0
    priorities = [lead + round.tree.path_prob(node) for node in nodes]
    return RowRequest(
        session=session,
        nodes=nodes,
        priorities=priorities,
        is_target_waiting=is_awaited,
        num_unprefilled=num_unread,
        round_index=round.index,
        tenant=tenant,
        num_prefilled=num_read,
    )


def select_rows(
    requests: Sequence[RowRequest[K]],
    row_limit: int,
    prefill_chunk: int,
    cost: StepCost | None = None,
    is_shared: bool = False,
) -> Schedule[K]:
    """Choose at most `row_limit` rows for the next step, the most valuable first, and return its schedule.

    The draft-tree nodes chosen for a request are appended to its `granted`. `prefill_chunk` is the maximum number of
    tokens to prefill in the step. `is_shared` says that several tenants use the draft, even if one alone requests rows
    now: each tenant then first gets an equal share of the rows. If `cost` is given too, rows beyond these shares and
    prefill tokens are added only while, together, they take about no longer than the rows within the shares.
    """
    ranked = sorted(
        ((priority, number, node) for number, request in enumerate(requests) for priority, node in _pairs(request)),
        key=lambda item: (-item[0], item[1]),
    )
    tenants = [requests[number].tenant for _, number, _ in ranked]
    is_alone = len(set(tenants)) < 2
    equal, more = _shares(tenants, row_limit, max_share=1 if is_shared and is_alone else row_limit)
    spare_s = cost.at(len(equal)) if cost is not None and (is_shared or not is_alone) else None
    num_more = row_limit - len(equal)
    if spare_s is not None and cost is not None and cost.per_row_s:
        has_text = any(request.is_in_prefill for request in requests)
        num_more = min(num_more, int(spare_s / cost.per_row_s / (2 if has_text else 1)))
        spare_s -= cost.per_row_s * min(num_more, len(more))
    for index in sorted([*equal, *more[:num_more]]):
        _, number, node = ranked[index]
        requests[number].granted.append(node)
    granted = [request for request in requests if request.granted]
    # Sessions that draft already must not wait long for others in prefill. These get a smaller chunk, unless a target
    # waits for one of them.
    in_prefill = [request for request in granted if request.is_in_prefill]
    if len(in_prefill) < len(granted) and not any(request.is_target_waiting for request in in_prefill):
        prefill_chunk = max(1, prefill_chunk // _CHUNK_DIVISOR)
    if spare_s is not None and cost is not None and cost.per_prefill_token_s:
        prefill_chunk = min(prefill_chunk, max(MIN_PREFILL_CHUNK, int(spare_s / cost.per_prefill_token_s)))
    return Schedule(_fit_chunk(granted, prefill_chunk), prefill_chunk)


def _shares(tenants: Sequence[Hashable], row_limit: int, max_share: int) -> tuple[list[int], list[int]]:
    """Return the indices of the rows within equal shares of the tenants, and the indices of all other rows.

    `tenants` holds the tenant of each row, most valuable row first. A share has at most `max_share` rows, and all
    shares together have at most `row_limit`.
    """
    totals = Counter(tenants)
    share = min(min(totals.values(), default=0), max(1, row_limit // max(len(totals), 1)), max_share)
    seen: Counter[Hashable] = Counter()
    shares: tuple[list[int], list[int]] = [], []
    for index, tenant in enumerate(tenants):
        seen[tenant] += 1
        shares[seen[tenant] > share].append(index)
    beyond = shares[0][row_limit:]
    return shares[0][:row_limit], sorted([*beyond, *shares[1]])


def _fit_chunk(requests: list[RowRequest[K]], prefill_chunk: int) -> list[RowRequest[K]]:
    """Return the requests without those whose prefill exceeds the rest of the chunk; the first prefill always fits.

    The chunk goes first to requests that a target waits for, then to those with the lowest `num_prefilled`.
    """
    in_prefill = [request for request in requests if request.is_in_prefill]
    left_out, num_tokens = set(), 0
    for request in sorted(in_prefill, key=lambda request: (not request.is_target_waiting, request.num_prefilled)):
        size = min(request.num_unprefilled, prefill_chunk)
        if num_tokens and num_tokens + size > prefill_chunk:
            left_out.add(id(request))
        else:
            num_tokens += size
    return [request for request in requests if id(request) not in left_out]


def _pairs(request: RowRequest[K]) -> list[tuple[float, Node]]:
    return list(zip(request.priorities, request.nodes, strict=True))
