"""Small models with distributions in rational numbers or pseudo-random floats, and one way to decode with them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from specbranch.core.costs import PairModel, StepCost
from specbranch.core.distribution import Distribution, Prob, RandomSource, SeededRandom, distribution_of
from specbranch.core.node import GreedyPicker, Node, RejectionPicker, TokenPicker, WithoutReplacementPicker
from specbranch.core.planner import Planner, Predictor
from specbranch.core.planners import make_planner
from specbranch.core.planners.predictors import ConstantPredictor
from specbranch.core.round import Signal
from specbranch.core.session import Session, StopCondition
from specbranch.core.tree import Tree
from specbranch.simulation.loop import Loop
from specbranch.simulation.scripted import Rule, ScriptedEngine, ScriptedTarget, SimulatedDraft, TextScript
from specbranch.trace import Answer, Header, Trace

SOME = ConstantPredictor(Signal.SOME)


def thirds(*parts: int) -> Distribution:
    """A rational distribution from whole-number weights."""
    return distribution_of([Fraction(part, sum(parts)) for part in parts])


# Distributions that depend on the last token and on the parity of the length; some tokens are impossible for one of the
# models.
_TARGET = {(0, 0): (3, 1), (0, 1): (1, 4), (1, 0): (2, 3), (1, 1): (1, 0)}
_DRAFT = {(0, 0): (1, 1), (0, 1): (2, 3), (1, 0): (4, 1), (1, 1): (1, 2)}
_TARGET3 = {0: (3, 1, 2), 1: (0, 1, 1), 2: (5, 1, 0)}
_DRAFT3 = {0: (1, 1, 1), 1: (2, 1, 3), 2: (1, 0, 1)}


def two_token_pair() -> tuple[TextScript, TextScript]:
    """A target and a draft over two tokens."""
    return (
        TextScript(2, lambda text: thirds(*_TARGET[text[-1], len(text) % 2])),
        TextScript(2, lambda text: thirds(*_DRAFT[text[-1], len(text) % 2])),
    )


def three_token_pair() -> tuple[TextScript, TextScript]:
    """A target and a draft over three tokens."""
    return (
        TextScript(3, lambda text: thirds(*_TARGET3[text[-1]])),
        TextScript(3, lambda text: thirds(*_DRAFT3[text[-1]])),
    )


def misaligned_pair() -> tuple[TextScript, TextScript]:
    """A draft that favours what the target never says: every root is tested against a residual."""
    return TextScript(3, lambda text: thirds(0, 2, 4)), TextScript(3, lambda text: thirds(4, 1, 1))


def random_script(
    seed: int, vocab_len: int, like: TextScript | None = None, share: float = 0.0, sharpness: int = 3
) -> TextScript:
    """Pseudo-random distributions, a pure function of the text; with `like`, that one is mixed in with that share."""

    def distribution(text: tuple[int, ...]) -> Distribution:
        rng = random.Random(f"{seed}:{text}")
        weights = [rng.random() ** sharpness + 1e-6 for _ in range(vocab_len)]
        probs: list[Prob] = [weight / sum(weights) for weight in weights]
        if like is not None:
            other = like.distribution(text)
            by_token = dict(zip(other.ids, other.probs, strict=True))
            probs = [(1 - share) * prob + share * float(by_token.get(i, 0)) for i, prob in enumerate(probs)]
        return distribution_of(probs)

    return TextScript(vocab_len, distribution)


def greedy(script: TextScript) -> TextScript:
    """The same model at temperature 0."""
    return TextScript(script.vocab_len, lambda text: Distribution(script.distribution(text).ids[:1], (1.0,), 0.0))


class CheckedLane(SimulatedDraft):
    """A draft lane that holds every distribution against a fresh reading of the whole text."""

    def __init__(self, script: TextScript, cost: StepCost) -> None:
        self.engine = ScriptedEngine(script)
        super().__init__(self.engine, cost)
        self._script = script

    def run(self, rows: Sequence[tuple[Session, Node]]) -> tuple[list[Distribution], float]:
        distributions, step_s = super().run(rows)
        for (session, node), distribution in zip(rows, distributions, strict=True):
            assert distribution == self._script.distribution(text_to(session, node))
        return distributions, step_s


def find(tree: Tree, tokens: Sequence[int]) -> Node | None:
    """The node at the end of `tokens` after the root, if it was drafted."""
    node: Node | None = tree.root
    for token in tokens:
        node = node.child_with(token) if node else None
    return node


def nodes(tree: Tree) -> Iterator[Node]:
    """Every drafted node still alive, the root not included."""
    stack = list(tree.root.children)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def text_to(session: Session, node: Node) -> tuple[int, ...]:
    """The committed tokens and the drafted ones up to a node."""
    path: list[int] = []
    here: Node | None = node
    while here is not None and here is not session.tree.root:
        path.append(here.token)
        here = here.parent
    return (*session.tokens, *reversed(path))


def decode(
    target: TextScript,
    draft: TextScript,
    planner: Planner[Any],
    chance: RandomSource,
    *,
    prompt: Sequence[int] = (0,),
    rule: Rule = "match",
    c: float = 2.0,
    ending: StopCondition,
) -> Session:
    """Decode one sequence in virtual time."""
    costs = PairModel()
    draws: dict[Rule, TokenPicker] = {
        "match": GreedyPicker(),
        "reject": WithoutReplacementPicker(chance),
        "serve": RejectionPicker(lambda one: one, lambda node, probs: chance.pick(probs), costs.calibration),
    }
    draw = draws[rule]
    session = Session(prompt, planner, draw, costs, ending)
    lane = CheckedLane(draft, StepCost(1.0))
    Loop([session], ScriptedTarget(target, StepCost(c), chance, rule), lane, costs).run()
    return session


def assert_every_drafted_token_is_accounted_for(session: Session) -> None:
    """Drafted tokens were used, were rolled back for one cause, or are still in the tree."""
    stats, tree = session.stats, session.tree
    assert tree.num_drafted == stats.used + stats.rolled_back + tree.num_alive
    assert tree.num_alive == sum(1 for _ in nodes(tree))
    assert stats.losing <= stats.rolled_back


def plain(target: TextScript, chance: RandomSource, prompt: Sequence[int], ending: StopCondition) -> list[int]:
    """The target alone, token by token: what every method must reproduce."""
    tokens = list(prompt)
    while True:
        distribution = target.distribution(tuple(tokens))
        token = distribution.ids[chance.pick(distribution.probs)]
        emitted, is_finished = ending.trim([token], len(tokens) - len(prompt))
        tokens += emitted
        if is_finished:
            return tokens[len(prompt) :]


def planner_of(name: str, settings: Mapping[str, Any] | None = None, predictor: Predictor = SOME) -> Planner[Any]:
    """A planner with small settings."""
    return make_planner(name, settings or {}, predictor)


def make_iid_trace(acceptance: float, num_answers: int, answer_len: int, rng: random.Random) -> Trace:
    """A trace in which every token is accepted alike and independently, as the closed forms assume."""
    distribution = Distribution((1,), (acceptance,), 0.0)  # all other tokens are the tail, told as token 0
    answers = [
        Answer(tuple(int(rng.random() < acceptance) for _ in range(answer_len)), (distribution,) * answer_len)
        for _ in range(num_answers)
    ]
    return Trace(Header(task="iid"), tuple(answers))


def stream(seed: int) -> RandomSource:
    """A seeded source of chance."""
    return SeededRandom(random.Random(seed))
