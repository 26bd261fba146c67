"""Record a service as a Chrome timeline, with a snapshot of the draft tree before each verdict.

The time between a reply and the next verdict of the same target is the target's step. A reply that was held back is a
wait. Recording appends one small tuple and does no I/O. Callers pass the time.
"""

from __future__ import annotations

import heapq
import logging
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specbranch.core.node import Node
from specbranch.core.tree import Tree
from specbranch.private_files import open_private

log = logging.getLogger(__name__)

Lane = tuple[bytes, bytes]  # a target's line in the timeline, by its client and namespace

_PROCESS = 1
_DRAFT_THREAD = 1
# The fields of each kind of event, in the order of its values.
_FIELDS = {
    "step": ("rows", "new_rows", "submitted", "accepted", "committed", "is_prefill"),
    "wait": ("rows",),
    "draft": ("rows", "tokens", "is_prefill", "sessions"),
    "open": ("planner", "sequences", "tokens"),
    "hit": ("rows",),
    "miss": ("rows",),
    "verdict": ("session", "tokens", "submitted", "is_hit", "tree"),
}
_INSTANTS = ("open", "hit", "miss", "verdict")
MAX_NODES = 256  # of a tree in the timeline, the likeliest
RUN, SUBMITTED = 1, 2  # bits of a node's mark


@dataclass(frozen=True, slots=True)
class VerdictTree:
    """The tree of a session before a verdict, and the tokens that the verdict committed."""

    session: int
    tokens: tuple[int, ...]
    tree: TreeSnapshot


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The verdict on one row of a step: how many tokens were submitted, and how many committed.

    `is_known`: the service has a session for the sequence. `is_hit`: before the verdict came, the draft had computed
    its distribution after the last committed token; None if the sequence is unknown or gets no drafts.
    """

    submitted: int
    committed: int
    is_known: bool
    is_hit: bool | None
    tree: VerdictTree | None = None

    @property
    def accepted(self) -> int:
        """How many submitted tokens were accepted: the committed tokens without the last, which is the target's own.

        A target may also have committed tokens of its own in steps without drafts, so the number is at most
        `submitted`.
        """
        return min(self.submitted, self.committed - 1)


class TimelineRecorder:
    """Records up to `max_events` events, then logs one warning and records no more. Two threads may use it at once.

    It records trees until they have `max_nodes` nodes in all. The `lane` of a target is its client and its namespace.
    """

    def __init__(self, max_events: int = 1_000_000, max_nodes: int = 4_000_000) -> None:
        self._max_events = max_events
        self._nodes_left = max_nodes
        # Kind, lane, start, end, values. The garbage collector soon stops tracking plain tuples of numbers.
        self._events: list[tuple[str, int, float, float, tuple[Any, ...]]] = []
        self._lanes: dict[Lane, int] = {}
        self._answered_s: dict[int, float] = {}
        self.is_full = False

    def __len__(self) -> int:
        return len(self._events)

    @property
    def takes_trees(self) -> bool:
        """Whether more trees can be recorded: neither the events nor the trees' nodes have reached their maximum."""
        return self._nodes_left > 0 and not self.is_full

    def open(self, lane: Lane, at_s: float, planner: str, num_sequences: int, num_tokens: int) -> None:
        """Record that the target of `lane` opened sequences, with `num_tokens` tokens in all, and their planner."""
        self._record("open", self._number(lane), at_s, at_s, (planner, num_sequences, num_tokens))

    def arrive(self, lane: Lane, at_s: float, rows: Sequence[RowVerdict]) -> None:
        """Record a step of the target of `lane` with its verdicts: it ends at `at_s` and began with the last reply.

        Also record the numbers of hits and misses, and the trees of the verdicts.
        """
        number = self._number(lane)
        start_s = self._answered_s.pop(number, None)
        if start_s is not None:
            num_known = sum(row.is_known for row in rows)
            sums = (
                sum(row.submitted for row in rows),
                sum(row.accepted for row in rows),
                sum(row.committed for row in rows),
            )
            self._record("step", number, start_s, at_s, (len(rows), len(rows) - num_known, *sums, num_known == 0))
        for kind, is_hit in (("hit", True), ("miss", False)):
            count = sum(row.is_hit is is_hit for row in rows)
            if count:
                self._record(kind, number, at_s, at_s, (count,))
        for row in rows:
            if row.tree is not None:
                met = row.tree
                self._nodes_left -= len(met.tree)
                self._record(
                    "verdict", number, at_s, at_s, (met.session, met.tokens, row.submitted, row.is_hit, met.tree)
                )

    def answer(self, lane: Lane, since_s: float, at_s: float, num_held: int) -> None:
        """Record that a reply to the target of `lane` was sent at `at_s`, which is the start of the target's next step.

        If `num_held`, the number of rows that had to wait for their drafts, is not 0, also record a wait from `since_s`
        to `at_s`.
        """
        number = self._number(lane)
        self._answered_s[number] = at_s
        if num_held and at_s > since_s:
            self._record("wait", number, since_s, at_s, (num_held,))

    def draft(self, start_s: float, end_s: float, rows: int, tokens: int, is_prefill: bool, sessions: set[int]) -> None:
        """Record one step of the draft engine: its times, counts of rows and tokens, and the ids of its sessions.

        `is_prefill`: the step counts as prefill.
        """
        self._record("draft", 0, start_s, end_s, (rows, tokens, is_prefill, tuple(sorted(sessions))))

    def write(self, path: Path, **about: Any) -> None:
        """Write the timeline to a file, completely or not at all, readable by its owner only.

        `about` is stored with the events.
        """
        encode = msgspec.json.encode
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)  # left by a run that was killed
        with open_private(part, "xb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode({**about, "is_cut": self.is_full}))
            file.write(b',"traceEvents":[\n')
            for index, event in enumerate(self.trace_events()):
                file.write((b",\n" if index else b"") + encode(event))
            file.write(b"\n]}\n")
        part.replace(path)

    def trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in Chrome's trace format, the names of the timeline's lines first.

        Times count from the first event.
        """
        yield from self._names()
        origin_s = min((event[2] for event in self._events), default=0.0)
        for kind, number, start_s, end_s, values in self._events:
            args = dict(zip(_FIELDS[kind], values, strict=True))
            if kind == "verdict":
                args["tree"] = args["tree"].as_json()
            event = {
                "name": _name(kind, args),
                "cat": kind,
                "pid": _PROCESS,
                "tid": _thread(kind, number),
                "ts": _microseconds(start_s - origin_s),
            }
            if kind in _INSTANTS:
                yield {**event, "ph": "i", "s": "t", "args": args}
            else:
                yield {**event, "ph": "X", "dur": _microseconds(end_s - start_s), "args": args}

    def _names(self) -> Iterator[dict[str, Any]]:
        yield _metadata("process_name", 0, name="specbranch")
        threads = {_DRAFT_THREAD: "draft"}
        for number in self._lanes.values():
            threads[_thread("step", number)] = f"target {number}"
            threads[_thread("wait", number)] = f"wait {number}"
        for thread, name in threads.items():
            yield _metadata("thread_name", thread, name=name)
            yield _metadata("thread_sort_index", thread, sort_index=thread)

    def _number(self, lane: Lane) -> int:
        number = self._lanes.get(lane)
        if number is None:
            if self.is_full:
                return 0  # it records nothing more
            number = self._lanes[lane] = len(self._lanes) + 1
        return number

    def _record(self, kind: str, number: int, start_s: float, end_s: float, values: tuple[Any, ...]) -> None:
        if len(self._events) < self._max_events:
            self._events.append((kind, number, start_s, end_s, values))
        elif not self.is_full:
            self.is_full = True
            log.warning("the timeline is full after %d events; later events are not recorded", self._max_events)


def _name(kind: str, args: dict[str, Any]) -> str:
    """Return the title of an event in the viewer."""
    if kind == "step":
        # No message says when a target starts on a new sequence; the target may have been idle before.
        return "prefill or idle" if args["is_prefill"] else f"{args['accepted']}/{args['submitted']}"
    if kind == "draft":
        return "prefill" if args["is_prefill"] else f"draft {args['rows']}"
    return kind


def _thread(kind: str, number: int) -> int:
    """Return the number of the line that shows an event: the first is the draft's, then every target has two.

    The first of these two shows the target's steps and instants, the second its waits.
    """
    if kind == "draft":
        return _DRAFT_THREAD
    return 2 * number + (kind == "wait")


def _metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": args}


def _microseconds(time_s: float) -> float:
    return round(1e6 * time_s, 3)


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A copy of a draft tree: the nodes below the root, a parent before its children.

    `parents` are the numbers of the nodes' parents. The root has number 0 and is left out; the others count from 1.
    """

    parents: array[int]
    tokens: array[int]
    percents: array[int]  # probability of the path from the root
    marks: array[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as a JSON dict: the four arrays by name, as lists of equal length."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}


def take_snapshot(tree: Tree, num_submitted: int) -> TreeSnapshot:
    """Return a copy of the tree's likeliest nodes; the target received the first `num_submitted` submitted tokens."""
    submitted = {id(node) for node in (tree.submitted or [])[:num_submitted]}
    snapshot = TreeSnapshot(array("H"), array("i"), array("B"), array("B"))
    for parent, node in _likeliest(tree.root):
        snapshot.parents.append(parent)
        snapshot.tokens.append(node.token)
        snapshot.percents.append(min(100, round(100 * math.exp(node.log_prob - tree.root.log_prob))))
        snapshot.marks.append(RUN * (node.distribution is not None) + SUBMITTED * (id(node) in submitted))
    return snapshot


def _likeliest(root: Node) -> Iterator[tuple[int, Node]]:
    """Yield nodes with the numbers of their parents, the likeliest first, but none before its parent."""
    heap: list[tuple[float, int, int, Node]] = []
    number = num_seen = 0
    parent: Node = root
    while True:
        for child in parent.children:
            num_seen += 1
            heapq.heappush(heap, (-child.log_prob, num_seen, number, child))
        if not heap or number == MAX_NODES:
            return
        number += 1
        _, _, above, parent = heapq.heappop(heap)
        yield above, parent
