"""A model with given distributions and step times: for exact tests and for simulation, never for a claim about speed.

`ScriptedEngine` passes the same conformance suite as the real engines. `ScriptedTarget` verifies by either rule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from specbranch.core.chance import Chance
from specbranch.core.costs import StepCost
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.session import Session
from specbranch.core.verdict import Verdict
from specbranch.core.verify import Offer, match, reject
from specbranch.engines.binding import Binding, Feed
from specbranch.engines.protocol import DraftEngine, EngineInfo, Row, require_length, require_rows

State = Hashable
Rule = Literal["match", "reject", "serve"]


class Script(Protocol):
    """A language model as a pure function of the sequence, folded over its tokens."""

    vocab_len: int

    def start(self) -> State:
        """The state of the empty sequence."""
        ...

    def advance(self, state: State, token: int) -> State:
        """The state after one more token."""
        ...

    def distribution(self, state: State) -> Distribution:
        """The next-token distribution in a state."""
        ...


class TextScript:
    """A script given by one function from the whole sequence to a distribution."""

    def __init__(self, vocab_len: int, distribution: Callable[[tuple[int, ...]], Distribution]) -> None:
        self.vocab_len = vocab_len
        self._distribution = distribution

    def start(self) -> tuple[int, ...]:
        return ()

    def advance(self, state: Any, token: int) -> tuple[int, ...]:
        return (*state, token)

    def distribution(self, state: Any) -> Distribution:
        return self._distribution(state)


@dataclass(frozen=True, slots=True)
class _Cell:
    """The end of one sequence; sequences share their beginnings, so a fork copies nothing."""

    state: State
    length: int
    before: _Cell | None


class ScriptedEngine:
    """A draft engine whose model is a script."""

    def __init__(self, script: Script, row_limit: int = 64) -> None:
        self.info = EngineInfo(
            model="scripted",
            device="none",
            vocab_len=script.vocab_len,
            row_limit=row_limit,
            max_handles=1 << 30,
            max_tokens=1 << 30,
        )
        self._script = script
        self._cells: dict[int, _Cell] = {}
        self._handles = count()

    @property
    def num_handles(self) -> int:
        """Handles open now."""
        return len(self._cells)

    @property
    def num_tokens(self) -> int:
        seen: set[int] = set()
        for end in self._cells.values():
            cell: _Cell | None = end
            while cell is not None and cell.length and id(cell) not in seen:
                seen.add(id(cell))
                cell = cell.before
        return len(seen)

    def open(self) -> int:
        return self._hold(_Cell(self._script.start(), 0, None))

    def fork(self, handle: int, length: int) -> int:
        return self._hold(self._cell(handle, length))

    def truncate(self, handle: int, length: int) -> None:
        self._cells[handle] = self._cell(handle, length)

    def close(self, handle: int) -> None:
        del self._cells[handle]

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        require_rows(rows)
        return [distribution for row in rows for distribution in self._run(row)]

    def shutdown(self) -> None:
        self._cells.clear()

    def _run(self, row: Row) -> list[Distribution]:
        cell = self._cells[row.handle]
        passed = []
        for token in row.tokens:
            cell = _Cell(self._script.advance(cell.state, token), cell.length + 1, cell)
            passed.append(cell)
        self._cells[row.handle] = cell
        return [self._script.distribution(cell.state) for cell in passed[-row.num_outputs :]]

    def _hold(self, cell: _Cell) -> int:
        handle = next(self._handles)
        self._cells[handle] = cell
        return handle

    def _cell(self, handle: int, length: int) -> _Cell:
        cell = self._cells[handle]
        require_length(handle, cell.length, length)
        while cell.length > length:
            assert cell.before is not None
            cell = cell.before
        return cell


class EngineLane:
    """A draft engine as a lane of the round loop, with given step times."""

    def __init__(self, engine: DraftEngine, cost: StepCost) -> None:
        self._engine = engine
        self._cost = cost
        self._bindings: dict[Session, Binding] = {}
        self.row_limit = engine.info.row_limit

    def run(self, rows: Sequence[tuple[Session, Node]]) -> tuple[list[Distribution], float]:
        self._forget_finished()
        by_session: dict[Session, list[Node]] = {}
        for session, node in rows:
            by_session.setdefault(session, []).append(node)
        feeds: list[Feed] = []
        for session, nodes in by_session.items():
            binding = self._bindings.setdefault(session, Binding(self._engine))
            feeds += binding.feeds(session.tokens, session.tree, nodes)
        run = [node for feed in feeds for node in feed.nodes]
        found = dict(zip(run, self._engine.run([feed.row for feed in feeds]), strict=True))
        return [found[node] for _, node in rows], self._cost.at(len(rows))

    def close(self) -> None:
        """Give all handles back."""
        for binding in self._bindings.values():
            binding.close()
        self._bindings.clear()

    def _forget_finished(self) -> None:
        for session in [session for session in self._bindings if session.is_finished]:
            self._bindings.pop(session).close()


class ScriptedTarget:
    """A target lane whose model is a script, verifying by rule A (`match`) or rule B (`reject`; `serve` as engines do).

    `entry_s` is what a step with drafts takes beyond the cost of its tokens.
    """

    def __init__(
        self, script: Script, cost: StepCost, chance: Chance, rule: Rule = "match", entry_s: float = 0.0
    ) -> None:
        self._script = script
        self._cost = cost
        self._entry_s = entry_s
        self._chance = chance
        self._rule = rule
        self._states: WeakKeyDictionary[Session, tuple[int, State]] = WeakKeyDictionary()

    def step_s(self, sessions: Sequence[Session]) -> float:
        # What costs is a token of the batch, submitted or to be made.
        num_submitted = sum(len(session.submitted) for session in sessions)
        return self._cost.at(len(sessions) + num_submitted) + (self._entry_s if num_submitted else 0.0)

    def verify(self, session: Session) -> Verdict:
        states = [self._state(session)]
        for token in session.submitted:
            states.append(self._script.advance(states[-1], token))
        if self._rule == "match":
            return match(session.submitted, lambda index: self._sample(self._script.distribution(states[index])))
        vocab_len = self._script.vocab_len
        distributions = [self._script.distribution(state).dense(vocab_len) for state in states]
        offered = offers(session, vocab_len) if self._rule == "reject" else served_offers(session, vocab_len)
        return reject(offered, distributions, self._chance)

    def _sample(self, distribution: Distribution) -> int:
        return distribution.ids[self._chance.pick(distribution.probs)]

    def _state(self, session: Session) -> State:
        length, state = self._states.get(session, (0, self._script.start()))
        for token in session.tokens[length:]:
            state = self._script.advance(state, token)
        self._states[session] = (len(session.tokens), state)
        return state


def offers(session: Session, vocab_len: int) -> list[Offer]:
    """What the draft offers to rule B at each submitted position and the branch point: distribution, tokens drawn."""
    positions = [session.tree.root, *(session.tree.submitted or ())]
    return [
        Offer(
            node.distribution.dense(vocab_len) if node.distribution else Distribution((), (), 0.0).dense(vocab_len),
            tuple(c.token for c in node.children),
        )
        for node in positions
    ]


def served_offers(session: Session, vocab_len: int) -> list[Offer]:
    """What a stock engine is told: one token a place, drawn from what is told with it, or certain; then none."""
    told = []
    for node in session.tree.submitted or ():
        q = node.drawn_from or Distribution((node.token,), (1,), 0.0)
        told.append(Offer(q.dense(vocab_len), (node.token,)))
    return [*told, Offer(Distribution((), (), 0.0).dense(vocab_len), ())]
