"""Budget: run the draft rows that are most likely to be used, whichever verdict they prepare for.

The target emits a token of the tree with a probability: the product, along its path from the last committed token, of
how often the draft is right there (`core/calibration.py`). A row that computes the draft's distribution after the token
is worth that probability, be it after the whole submission, after a rejection half-way, or deep in a branch. So one
ranking says which verdicts to prepare for and how deep; the measured cost of rows says how many rows to run. If all
branches start at one position the planner acts like SpecBranch, with fixed probabilities like SSD, and with expensive
rows like PEARL.

N-gram guesses are the tokens that followed the same few tokens before, in this sequence or in another answer. If a
submission ends at a node whose distribution is not computed yet, guesses are submitted after it. The draft step that
computes this distribution also computes those after the guesses below the node, so that one step gives several tokens
of depth. Where verifying a token costs the target time, tokens that will hardly be accepted are not submitted.

With `takes_turns` draft and target never compute at the same time: they share all cores, and each gets all of them in
its turn. The target waits as long as one more draft token is expected to save more time than its draft step takes. It
waits for the prefill of a prompt if drafts are expected to save as much in the rest of the answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from specbranch.core.calibration import MEMORY, TEXT
from specbranch.core.costs import DecayingMean
from specbranch.core.node import Node
from specbranch.core.planner import Planner, Predictor, Rows, Settings, Share, Window
from specbranch.core.round import Round, Verdict
from specbranch.core.tree import Tree

_MIN_PROB = 0.01
_FIRST_ROUND = 1  # it begins with the first token of the answer, which nobody should wait for longer than without us
_MIN_MEASURED = 8  # draft steps before their cost is believed: the first ones after a start are slow
_PACE_HALF_LIFE = 8.0  # rounds of one sequence, whose text may turn from prose to a copy and back
_PRIOR_ROUNDS = 2.0  # weight of what other sequences committed in the pace of one sequence
_MIN_GUESS_PROB = 0.1  # a guess that is verified in vain costs the target a little


@dataclass(frozen=True, slots=True)
class BudgetSettings(Settings):
    """Settings of `BudgetPlanner`. `gamma`: the longest submission. `max_rows`: the most rows of one draft step.

    `uses_text`: make n-gram drafts from the sequence's own repetitions. `uses_memory`: make them from past answers of
    the same target. `run_guesses`: also compute the draft model's distributions after n-gram guesses, in the step that
    computes the one before them. `cost_aware`: submit no token whose acceptance probability is not worth its
    verification. `min_accept_prob`: submit no token with a lower acceptance probability, even where verification is
    free; this saves work of the target and costs some speed. `takes_turns`: draft only while the target waits, and let
    it wait while that saves more time than it takes; for a draft model on the target's own cores. `wait_for_draft`: let
    the target wait for a draft of full length; only for tests.
    """

    gamma: Window = 15  # with the target's own token a power of two, as kernels like it
    max_rows: Rows = 12
    uses_text: bool = True
    uses_memory: bool = True
    run_guesses: bool = True
    cost_aware: bool = True
    min_accept_prob: Share = 0.0
    takes_turns: bool = False
    wait_for_draft: bool = False


class BudgetPlanner(Planner[BudgetSettings]):
    """The default planner: runs the draft rows that are most likely to be used, as many as are worth their time."""

    settings_type = BudgetSettings

    def __init__(self, settings: BudgetSettings, predictor: Predictor) -> None:
        super().__init__(settings, predictor)
        used = {TEXT: settings.uses_text, MEMORY: settings.uses_memory}
        self._sources = [source for source, is_used in used.items() if is_used]
        self._awaited: int | None = None  # the round in which the target waits for a draft, with `takes_turns`
        self._num_steps = 0  # draft steps for which the target has waited in this round
        self._was_too_slow = False  # a further draft step was not worth its time
        self._last_tip: Node | None = None  # that one of them has run
        self._num_emitted = 0  # tokens of the answer
        # Tokens that a verdict commits: in all rounds, and in those without a wait.
        self._pace, self._plain_pace = DecayingMean(_PACE_HALF_LIFE), DecayingMean(_PACE_HALF_LIFE)

    @property
    def may_block_target(self) -> bool:
        return self.settings.wait_for_draft or self.settings.takes_turns

    @property
    def waits_for_prefill(self) -> bool:
        return self.settings.takes_turns

    def submit(self, round: Round) -> Sequence[Node] | None:
        tree = round.tree
        if self.settings.wait_for_draft:
            tip = tree.next_unrun(tree.root, self.settings.gamma)
            if tip is not None and tree.path_prob(tip) >= _MIN_PROB:
                return None
        may_wait = self.settings.takes_turns and round.index != _FIRST_ROUND and self._waiting_pays(round)
        if may_wait and (self._awaited == round.index or self._prefill_pays(round)):
            self._awaited = round.index
            return None
        return self.submit_after(round, tree.root)

    def submit_after(self, round: Round, start: Node) -> Sequence[Node] | None:
        """Return the chain below `start` that the target should verify once a verdict has ended at `start`.

        The chain ends before the first token that does not pay for its verification; after the last token that the
        draft model proposed, n-gram guesses follow. The chain is empty if it would gain less than submitting any draft
        costs. With `wait_for_draft` or `takes_turns`, return None unless `start` is the root.
        """
        tree, settings, prices = round.tree, self.settings, round.costs.target
        if (settings.wait_for_draft or settings.takes_turns) and start is not tree.root:
            return None
        price = prices.min_accept_prob if settings.cost_aware else 0.0
        min_prob = max(price, settings.min_accept_prob)
        chain = tree.chain(start, settings.gamma, has_guesses=False) if start.distribution is not None else []
        for index, node in enumerate(chain):
            if math.exp(node.log_prob - start.log_prob) < min_prob:
                del chain[index:]
                break
        tip = chain[-1] if chain else start
        if self._sources and tip.distribution is None and len(chain) < settings.gamma:
            min_guess_prob = max(_MIN_GUESS_PROB, min_prob) * math.exp(start.log_prob - tree.root.log_prob)
            chain += round.ngrams.extend(tree, tip, settings.gamma - len(chain), min_guess_prob, self._sources)
        if chain and settings.cost_aware and self._gain(start, chain, price, min_prob) < prices.min_gain:
            return []
        return chain

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        tree, settings = round.tree, self.settings
        depth = len(tree.submitted or ()) + settings.gamma
        deepest = tree.root.position + depth

        def guess(node: Node, min_prob: float) -> None:
            round.ngrams.extend(tree, node, deepest - node.position, min_prob, self._sources)

        if self._sources:  # here, because an answer to the target must not wait for it
            round.ngrams.index_new_tokens()
        deepens = settings.run_guesses and self._sources
        if settings.takes_turns:
            # Asked again here: the draft must not begin a step after the one at whose end the target goes on.
            is_awaited = self._awaited == round.index and round.is_waiting
            return self._rows_in_turn(round) if is_awaited and self._waiting_pays(round) else []
        return best_rows(round, tree.root, depth, settings.max_rows, _MIN_PROB, guess if deepens else None)

    def learn(self, round: Round, verdict: Verdict) -> None:
        if not self.settings.takes_turns:
            return
        costs, tree, num_tokens = round.costs, round.tree, verdict.accepted + 1
        if not self._num_emitted:
            costs.answer_len.begin()
        costs.answer_len.add(num_tokens)
        self._num_emitted += num_tokens
        for node in (tree.root, *(tree.submitted or ())):
            if node.distribution is not None and node.children:
                costs.observe_first_choice(tree.path_prob(node.children[0], node))
        cost = costs.draft.cost
        if cost is not None:
            costs.target.observe_wait(self._num_steps * cost.at(costs.target.num_rows))
        self._pace.observe(num_tokens)
        if not self._num_steps:
            self._plain_pace.observe(num_tokens)
            costs.plain_pace.observe(num_tokens)
            if self._was_too_slow:
                costs.draft.fade(1 / costs.target.num_rows)  # each sequence of the step comes here
        self._num_steps, self._was_too_slow = 0, False

    def _tip(self, tree: Tree) -> Node | None:
        """Return the node whose distribution the drafted chain needs to grow; None if the chain cannot grow."""
        chain = tree.chain(tree.root, self.settings.gamma, has_guesses=False)
        tip = chain[-1] if chain else tree.root
        return tip if tip.distribution is None and len(chain) < self.settings.gamma else None

    def _waiting_pays(self, round: Round) -> bool:
        """Return whether the target should wait for one more draft step, which adds one token to the drafted chain."""
        tree, costs = round.tree, round.costs
        tip = self._tip(tree)
        if tip is None:
            return False
        if costs.draft.cost is None or costs.draft.num_observed < _MIN_MEASURED:
            return tree.path_prob(tip) >= _MIN_PROB
        # While the draft computes, the whole batch waits, so each of its sequences pays an equal part of the time.
        num_rows = costs.target.num_rows
        # Time is worth what this sequence emits in it, which may be far from the average of texts.
        mean = max(costs.target.tokens_per_step.committed, 1.0)
        rate = costs.target.rate * self._pace.value(mean, _PRIOR_ROUNDS) / mean
        self._was_too_slow = self._gain_of_step(round, tip) <= costs.draft.cost.at(num_rows) / num_rows * rate
        return not self._was_too_slow

    def _gain_of_step(self, round: Round, tip: Node) -> float:
        """Return how many more tokens the target is expected to accept after one more draft step, which runs `tip`.

        The token that the step adds is assumed to be accepted as often as the draft's first choices on average. Its
        gain is reduced by that of the n-gram guess at its position, which needs no draft step.
        """
        tree, costs = round.tree, round.costs
        guesses = round.ngrams.extend(tree, tip, 1, 0.0, self._sources) if self._sources else []
        guess_prob = tree.path_prob(guesses[0]) if guesses else 0.0
        price = costs.target.min_accept_prob
        return tree.path_prob(tip) * costs.first_choice_prob - price - max(guess_prob - price, 0.0)

    def _prefill_pays(self, round: Round) -> bool:
        """Return whether the target should wait for the prefill that comes before the first draft step of this round.

        It should if drafts would save as much time in the rest of the answer. This is expected to have the length that
        answers have on average, but at least as many tokens again as it has already.
        """
        costs, tip = round.costs, self._tip(round.tree)
        draft, target, num_rows = costs.draft.cost, costs.target.cost, costs.target.num_rows
        prefill_s = round.num_unprefilled * costs.draft.prefill_token_s
        if tip is None or draft is None or target is None or prefill_s <= draft.at(1):
            return True
        pace = self._plain_pace.value(costs.plain_pace.value(1.0, _PRIOR_ROUNDS), _PRIOR_ROUNDS)
        round_s, num_tokens, gain = target.at(num_rows), pace, self._gain_of_step(round, tip)
        plain_s = token_s = round_s / num_tokens
        for _ in range(self.settings.gamma):
            round_s, num_tokens = round_s + draft.at(num_rows), num_tokens + gain
            token_s = min(token_s, round_s / num_tokens)
            gain *= costs.first_choice_prob
        num_left = max(costs.answer_len.mean(num_rows) - self._num_emitted, self._num_emitted)
        return (plain_s - token_s) * num_left >= prefill_s * num_rows  # all sequences of the batch wait

    def _rows_in_turn(self, round: Round) -> Sequence[Node]:
        """Return the nodes to run while the target waits: the last one of the drafted chain, and some guesses after it.

        A guess is included if it is worth its row. The draft step is counted once, even if it is planned twice.
        """
        tree, settings = round.tree, self.settings
        tip = self._tip(tree)
        assert tip is not None, "only while waiting pays"
        self._num_steps += tip is not self._last_tip  # a step may be planned twice
        self._last_tip = tip
        nodes, cost = [tip], round.costs.draft.cost
        if settings.run_guesses and self._sources and cost is not None:
            count = min(settings.max_rows - 1, tree.root.position + settings.gamma - tip.position)
            nodes += round.ngrams.extend(tree, tip, count, _MIN_PROB, self._sources)
            nodes = nodes[: cost.best_rows([tree.path_prob(node) for node in nodes])]
        return nodes

    def _gain(self, start: Node, chain: Sequence[Node], price: float, min_prob: float) -> float:
        """Return the expected number of accepted tokens in `chain`, minus `price` for each token.

        After the first sampled token, assume that each token up to `gamma` is as likely to be accepted as that one, and
        ignore those below `min_prob`. Their real probabilities are not used, because they depend on which token was
        sampled: whether that token is submitted would then depend on its value, and rejection sampling would not be
        exact.
        """
        gain = 0.0
        for index, node in enumerate(chain):
            prob = math.exp(node.log_prob - start.log_prob)
            gain += prob - price
            if node.sampled_from is not None:
                assert node.parent is not None, "below the start"
                alike = math.exp(node.log_prob - node.parent.log_prob)
                further = (prob * alike**more for more in range(1, self.settings.gamma - index))
                return gain + sum(one - price for one in takewhile(lambda one: one >= min_prob, further))
        return gain


def best_rows(
    round: Round,
    start: Node,
    depth: int,
    max_rows: int,
    min_prob: float,
    guess: Callable[[Node, float], object] | None = None,
) -> list[Node]:
    """Return the nodes at or below `start` to run in the next draft step: those with the most probability per time.

    To run a node is to compute the distribution after it. At most `max_rows` nodes, none deeper than `depth` tokens
    below `start` or with a probability below `min_prob`; one node while the cost of rows is unknown. `guess` is as for
    `frontier`.
    """
    tree, cost = round.tree, round.costs.draft.cost
    if cost is None:
        return [node for node, _ in frontier(tree, start, depth, 1, min_prob)]
    # A further row pays only if its share of the best row's probability is at least its share of the first row's time.
    # The best row itself must stay, however probabilities are rounded.
    tips = frontier(tree, start, depth, max_rows, min_prob, min(cost.share_of_more, 0.999), guess)
    return [node for node, _ in tips[: cost.best_rows([prob for _, prob in tips])]]


def frontier(
    tree: Tree,
    start: Node,
    depth: int,
    count: int,
    min_prob: float,
    min_share: float = 0.0,
    guess: Callable[[Node, float], object] | None = None,
) -> list[tuple[Node, float]]:
    """Return the likeliest nodes at or below `start` whose distributions are not computed, with their probabilities.

    A node's probability is that of its path from `start`. At most `count` nodes, none deeper than `depth` tokens below
    `start`, none with a probability below `min_prob` or below `min_share` times that of the likeliest node. Children
    that cannot be likely enough are not drawn. For each returned node without children `guess(node, min_prob)` is
    called and may add guesses of at least this probability below it; a node comes before the guesses below it, and they
    can run in the same step.
    """
    found: list[tuple[Node, float]] = []
    heap = [(0.0, 0, start, 0)]  # minus log probability, order of discovery, node, its rank among its parent's children
    num_seen = 1
    while heap and len(found) < count:
        cost, _, node, rank = heapq.heappop(heap)
        if node.distribution is None:
            prob = math.exp(-cost)
            if prob < min_prob:
                break
            if not found:
                min_prob = max(min_prob, prob * min_share)
            found.append((node, prob))
            if guess is not None and not node.children:
                guess(node, min_prob)
        nexts = [(node, 0)] if node.position < start.position + depth else []
        # Of guesses after the same node only one chain can run in the step that runs this node.
        if node is not start and node.parent is not None and node.parent.distribution is not None:
            nexts.append((node.parent, rank + 1))
        for parent, child_rank in nexts:
            min_child_prob = min_prob * math.exp(start.log_prob - parent.log_prob)
            if child_rank < len(parent.children) or tree.grow(parent, min_child_prob):
                child = parent.children[child_rank]
                if child.log_prob - parent.log_prob >= math.log(min_child_prob):
                    heapq.heappush(heap, (start.log_prob - child.log_prob, num_seen, child, child_rank))
                    num_seen += 1
    return found
