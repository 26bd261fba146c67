"""Models with given distributions: a scripted engine and target, the replay of traces, and reference verification.

`ScriptedEngine` passes the same conformance suite as the real engines.

In a replay, the first token of a sequence is the index of its answer, followed by the prompt, if it was recorded: see
`prompt_of`. A sequence that departs from the recorded answer can never return to it. After that, and where no
distribution was recorded, the draft replays a recorded distribution from another position, picked by the sequence's
hash, so that planners see realistic distributions even on branches that cannot be accepted.

`ScriptedTarget` verifies in one of two ways. Exact match samples the target's own token at every position and accepts
the submitted tokens that equal it. It is exact for any submission and needs no draft distribution. Rejection sampling
tests sampled tokens by p/q, where p is the target's distribution and q the draft's, and accepts more of them. It is
exact only for tokens that were drawn from q, and whose values did not decide whether they were submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from specbranch.core.costs import StepCost
from specbranch.core.distribution import Dense, Distribution, Prob, RandomSource
from specbranch.core.node import Node
from specbranch.core.round import Verdict
from specbranch.core.session import Session
from specbranch.engines.base import DraftEngine, EngineInfo, Row, check_length, check_rows
from specbranch.engines.tree_cache import EngineRow, TreeCache
from specbranch.trace import NO_DISTRIBUTION, Answer, Trace

State = Hashable
Rule = Literal["match", "reject", "serve"]
_Place = tuple[int, int]  # answer index, number of its tokens consumed; negative within the prompt
_START = -1
_MODULUS = (1 << 61) - 1  # a Mersenne prime


class Script(Protocol):
    """Interface of a scripted model: a language model as a pure function of the sequence, computed token by token.

    A state represents a sequence.
    """

    vocab_len: int

    def start(self) -> State:
        """Return the state of the empty sequence."""
        ...

    def advance(self, state: State, token: int) -> State:
        """Return the state after one more token."""
        ...

    def distribution(self, state: State) -> Distribution:
        """Return the next-token distribution in a state."""
        ...


class TextScript:
    """A script, which stands for a model, as one function: from all tokens so far to the next token's distribution."""

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
    """A script's state after `length` tokens, linked to the cell of one token less, so that a fork copies nothing."""

    state: State
    length: int
    before: _Cell | None


class ScriptedEngine:
    """A draft engine whose model is a script, for the simulator and for tests."""

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
        """The number of open handles."""
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
        check_rows(rows)
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
        check_length(handle, cell.length, length)
        while cell.length > length:
            assert cell.before is not None
            cell = cell.before
        return cell


class SimulatedDraft:
    """The draft side of the simulator's loop: computes distributions on a draft engine, with given step times."""

    def __init__(self, engine: DraftEngine, cost: StepCost) -> None:
        self._engine = engine
        self._cost = cost
        self._tree_caches: dict[Session, TreeCache] = {}
        self.row_limit = engine.info.row_limit

    def run(self, rows: Sequence[tuple[Session, Node]]) -> tuple[list[Distribution], float]:
        self._forget_finished()
        by_session: dict[Session, list[Node]] = {}
        for session, node in rows:
            by_session.setdefault(session, []).append(node)
        feeds: list[EngineRow] = []
        for session, nodes in by_session.items():
            tree_cache = self._tree_caches.setdefault(session, TreeCache(self._engine))
            feeds += tree_cache.rows_for(session.tokens, session.tree, nodes)
        run = [node for feed in feeds for node in feed.nodes]
        found = dict(zip(run, self._engine.run([feed.row for feed in feeds]), strict=True))
        return [found[node] for _, node in rows], self._cost.at(len(rows))

    def close(self) -> None:
        """Close all handles that sessions hold in the engine."""
        for tree_cache in self._tree_caches.values():
            tree_cache.close()
        self._tree_caches.clear()

    def _forget_finished(self) -> None:
        for session in [session for session in self._tree_caches if session.is_finished]:
            self._tree_caches.pop(session).close()


class ScriptedTarget:
    """The target side of the simulator's loop, with given step times; its tokens come from a script.

    With the `rule` `match` it verifies by exact match, with the others by rejection sampling: `reject` tests all
    candidates of the draft at a position, `serve` one token per position, as real engines do. `entry_s` is the time
    that a step with drafts takes in addition to that of its tokens.
    """

    def __init__(
        self, script: Script, cost: StepCost, chance: RandomSource, rule: Rule = "match", entry_s: float = 0.0
    ) -> None:
        self._script = script
        self._cost = cost
        self._entry_s = entry_s
        self._chance = chance
        self._rule = rule
        self._states: WeakKeyDictionary[Session, tuple[int, State]] = WeakKeyDictionary()

    def step_s(self, sessions: Sequence[Session]) -> float:
        # Every token of the batch costs time, submitted or new.
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
        offered = candidates(session, vocab_len) if self._rule == "reject" else served_candidates(session, vocab_len)
        return reject(offered, distributions, self._chance)

    def _sample(self, distribution: Distribution) -> int:
        return distribution.ids[self._chance.pick(distribution.probs)]

    def _state(self, session: Session) -> State:
        length, state = self._states.get(session, (0, self._script.start()))
        for token in session.tokens[length:]:
            state = self._script.advance(state, token)
        self._states[session] = (len(session.tokens), state)
        return state


def candidates(session: Session, vocab_len: int) -> list[Candidates]:
    """Return for rejection sampling the candidates at each submitted position, and at the position after the last.

    The candidates are all tokens that the draft drew at a position, with the distribution that they were drawn from.
    """
    positions = [session.tree.root, *(session.tree.submitted or ())]
    return [
        Candidates((node.distribution or NO_DISTRIBUTION).dense(vocab_len), tuple(c.token for c in node.children))
        for node in positions
    ]


def served_candidates(session: Session, vocab_len: int) -> list[Candidates]:
    """Return the candidates that a real engine gets: the submitted token at each position, and none after the last.

    A token that was not sampled counts as drawn with probability 1.
    """
    offered = []
    for node in session.tree.submitted or ():
        q = node.sampled_from or Distribution((node.token,), (1,), 0.0)
        offered.append(Candidates(q.dense(vocab_len), (node.token,)))
    return [*offered, Candidates(NO_DISTRIBUTION.dense(vocab_len), ())]


def prompt_of(trace: Trace, index: int) -> tuple[int, ...]:
    """Return the prompt of a session that replays answer `index` of a trace: the index, then the recorded prompt."""
    return (index, *trace.answers[index].prompt)


class _ReplayScript:
    """Base class of the scripts that replay a trace.

    A state is `_START`, a position in a recorded answer, or the hash of a sequence that departed from the answer.
    """

    def __init__(self, trace: Trace) -> None:
        self._answers = trace.answers
        self._distributions = [
            distribution for answer in trace.answers for distribution in answer.distributions if distribution.ids
        ]
        said = (token for answer in trace.answers for token in answer.tokens)
        self.vocab_len = 1 + max(*said, *(max(distribution.ids) for distribution in self._distributions))

    def start(self) -> int:
        return _START

    def advance(self, state: Any, token: int) -> _Place | int:
        if state == _START:
            return (token, -len(self._answers[token].prompt))
        if not isinstance(state, tuple):
            return _mix(state, token)
        index, length = state
        answer = self._answers[index]
        if length < 0 or (length < len(answer.tokens) and answer.tokens[length] == token):
            return (index, length + 1)
        return _mix(index * 1_000_003 + length, token)

    def _answer_at(self, state: Any) -> tuple[Answer, int] | None:
        if not isinstance(state, tuple):
            return None
        index, length = state
        answer = self._answers[index]
        return (answer, length) if 0 <= length < len(answer.tokens) else None


class ReplayDraft(_ReplayScript):
    """The draft of a trace as a script: replays its recorded distributions.

    In a state without a recorded distribution, it replays that of another position, picked by a hash of the state.
    """

    def distribution(self, state: Any) -> Distribution:
        on_path = self._answer_at(state)
        if on_path:
            answer, length = on_path
            if answer.distributions[length].ids:
                return answer.distributions[length]
        return self._distributions[hash(state) % len(self._distributions)]


class ReplayTarget(_ReplayScript):
    """The target of a trace as a script: the recorded token with probability 1; token 0 outside the recorded answer."""

    def distribution(self, state: Any) -> Distribution:
        on_path = self._answer_at(state)
        if on_path:
            answer, length = on_path
            return _certain(answer.tokens[length])
        return _certain(0)


@lru_cache(maxsize=4096)
def _certain(token: int) -> Distribution:
    return Distribution((token,), (1.0,), 0.0)


def _mix(value: int, token: int) -> int:
    return (value * 6_364_136_223_846_793_005 + token + 1_442_695_040_888_963_407) % _MODULUS


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft's candidates at one position: tokens drawn from `distribution` without replacement, in order."""

    distribution: Dense
    tokens: tuple[int, ...]


def match(submitted: Sequence[int], sample: Callable[[int], int]) -> Verdict:
    """Verify submitted tokens by exact match, and return the verdict.

    `sample(i)` draws the target's token after i submitted tokens; it is called once for each committed token.
    """
    for index, token in enumerate(submitted):
        drawn = sample(index)
        if drawn != token:
            return Verdict(index, drawn)
    return Verdict(len(submitted), sample(len(submitted)))


def reject(offers: Sequence[Candidates], distributions: Sequence[Dense], chance: RandomSource) -> Verdict:
    """Verify submitted tokens by rejection sampling, and return the verdict.

    The candidates of each offer begin with a submitted token, except in the last offer, which holds guesses of the
    token after all submitted ones. `distributions[i]` is the target's distribution after i submitted tokens.
    """
    last = len(offers) - 1
    for index, (offer, distribution) in enumerate(zip(offers, distributions, strict=True)):
        token = reject_in_turn(distribution, offer, chance)
        if index == last or token != offer.tokens[0]:
            return Verdict(index, token)
    raise ValueError("rule B needs at least one offer, if only an empty one")


def reject_in_turn(p: Dense, offer: Candidates, chance: RandomSource) -> int:
    """Test offered tokens at one position by rejection sampling; return the token emitted, distributed exactly as p.

    p is the target's distribution. The tokens are tested in order, each against what rejected tokens left of p. If all
    are rejected, a token is sampled from the rest of p.
    """
    q = offer.distribution
    for token in offer.tokens:
        keep = accept_prob(p, q, token)
        if chance.pick((keep, 1 - keep)) == 0:
            return token
        p, q = recovery_distribution(p, q), renormalized_without(q, token)
    return chance.pick(list(p))


def accept_prob(p: Dense, q: Dense, token: int) -> Prob:
    """Return the probability to accept a token drawn from q if the target's distribution is p: min(1, p/q)."""
    ratio: Prob = p[token] / q[token]
    return min(ratio, 1)


def recovery_distribution(p: Dense, q: Dense) -> Dense:
    """Return the distribution to sample from after a rejection: the excess of p over q, normalized."""
    excess = np.maximum(p - q, 0)
    total = excess.sum()
    # If p = q, nothing is ever rejected; only rounding can lead here.
    return excess / total if total else p


def renormalized_without(q: Dense, token: int) -> Dense:
    """Return the distribution q after `token` has been drawn without replacement."""
    rest = q.copy()
    rest[token] = 0
    total = rest.sum()
    return rest / total if total else rest
