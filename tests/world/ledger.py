"""What went in and out of one life of a simulated service, as its router saw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specbranch.service.wire.messages import (
    DraftReply,
    FrameError,
    OpenSequences,
    PrefetchPush,
    StepRequest,
    StepRow,
    decode_reply,
    decode_request,
    unpack_tokens,
)
from specbranch.service.wire.payloads import Digest


@dataclass(slots=True)
class Ledger:
    """Counts, and which texts each namespace has told. `leaked` is called with a text that was not told."""

    leaked: Callable[[str], None] = print
    num_steps: int = 0
    num_rows: int = 0
    num_submitted: int = 0
    num_opened: int = 0
    num_unknown: int = 0
    num_unreadable: int = 0
    asked: dict[bytes, StepRequest] = field(default_factory=dict)  # by client: the step that has no answer yet
    _synced: set[tuple[bytes, bytes]] = field(default_factory=set)
    _namespaces: dict[bytes, bytes] = field(default_factory=dict)

    def hear(self, client: bytes, frame: bytes) -> None:
        """A message came in."""
        try:
            request = decode_request(frame)
        except FrameError:
            self.num_unreadable += 1
            return
        if isinstance(request, OpenSequences):
            self._namespaces[client] = request.namespace
            self.num_opened += len(request.sequences)
            self._synced |= {(request.namespace, Digest(unpack_tokens(packed)).name) for packed in request.sequences}
        elif isinstance(request, StepRequest):
            self._hear_step(client, request)

    def _hear_step(self, client: bytes, step: StepRequest) -> None:
        self._namespaces[client] = step.namespace
        self.num_steps += 1
        self.num_rows += len(_distinct(step.rows))
        self.asked.pop(client, None)  # it has gone on
        if any(row.prefetched is None for row in step.rows):
            self.asked[client] = step
        for row in step.rows:
            self.num_submitted += row.num_submitted
            if (step.namespace, row.before) in self._synced:
                self._synced.add((step.namespace, row.after))

    def say(self, client: bytes, frame: bytes) -> None:
        """A message goes out."""
        reply = decode_reply(frame)
        if isinstance(reply, DraftReply):
            self._say_proposals(client, reply)
        elif isinstance(reply, PrefetchPush):
            for told in reply.rows:
                if (self._namespaces.get(client), told.before) not in self._synced:
                    self.leaked("a client is told ahead of a text that its namespace does not have")

    def _say_proposals(self, client: bytes, reply: DraftReply) -> None:
        step = self.asked.pop(client, None)
        if step is None or step.round != reply.round:
            return
        self.num_unknown += sum(reply.rows[index] is None for index in _distinct(step.rows))
        for row, proposal in zip(step.rows, reply.rows, strict=True):
            if proposal is not None and row.prefetched is None and (step.namespace, row.after) not in self._synced:
                self.leaked("an answer is given for a text that its namespace does not have")


def _distinct(rows: Sequence[StepRow]) -> list[int]:
    """The rows that are looked up: those that are equal to one before them get its answer. Told ones come last."""
    first: dict[tuple[bytes, bytes], StepRow] = {}
    ranked = sorted(range(len(rows)), key=lambda index: rows[index].prefetched is not None)
    return [
        index
        for index in ranked
        if (row := rows[index]) is first.setdefault((row.before, row.after), row) or row != first[row.before, row.after]
    ]
