"""Simulate a run on two devices: real planners, sessions and scheduling on a trace, with given step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbranch.core.costs import PairModel, StepCost
from specbranch.core.distribution import SeededRandom
from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Predictor
from specbranch.core.planners import SettingError, make_planner, setting_names
from specbranch.core.planners.predictors import (
    TRAINED,
    OraclePredictor,
    RandomPredictor,
    ReplayPredictor,
    make_predictor,
    predictor_names,
)
from specbranch.core.round import Signal, Stats
from specbranch.core.session import Session, StopCondition
from specbranch.core.tree import CAUSES
from specbranch.extensions import load_extensions
from specbranch.simulation.loop import Loop, Step
from specbranch.simulation.presets import ModelPair, window_for
from specbranch.simulation.scripted import (
    ReplayDraft,
    ReplayTarget,
    ScriptedEngine,
    ScriptedTarget,
    SimulatedDraft,
    prompt_of,
)
from specbranch.trace import Answer, Trace, TraceError

_ROW_LIMIT = 64  # the default of draft engines
# The paper does not state its threshold; its authors' code had 0.2 and 0.3. If the target waits after a miss, this
# one is the fastest over all presets (studies/10-paper). The planner's default suits the service instead.
PAPER_CONFIDENCE = 0.5


@dataclass(frozen=True, slots=True)
class Layout:
    """The step times of two simulated devices; the unit of time is a draft step of one row.

    `c` is the time of a target step of one token; in this unit it is the speed ratio. `row_cost` is the time of each
    row of a draft step after the first, `token_cost` that of each token of a target step after the first, `entry_cost`
    the fixed time that drafts add to a target step. `batch` answers are decoded at once. `sharing` is the number of
    targets that one draft device serves, all in lockstep; below 1, a target has several draft devices, which divide its
    rows.
    """

    c: float
    row_cost: float = 0.0
    batch: int = 1
    token_cost: float = 0.0
    sharing: float = 1.0
    entry_cost: float = 0.0

    @property
    def draft(self) -> StepCost:
        """The time of a draft step as a function of the number of rows that each target requests.

        A draft device runs `sharing` times as many rows in a step.
        """
        return StepCost(1.0 + self.row_cost * max(0.0, self.sharing - 1), self.row_cost * self.sharing)

    @property
    def target(self) -> StepCost:
        """The time of a target step, without `entry_cost`, as a function of the number of tokens in its batch."""
        return StepCost(self.c, self.token_cost)

    @property
    def devices(self) -> float:
        """Number of devices per target: its own one, and its share of the draft devices."""
        return 1.0 + 1.0 / self.sharing


@dataclass(frozen=True, slots=True)
class Method:
    """A method to simulate: a planner's name, its settings that differ from the defaults, and a predictor's name.

    `predictor` is one of `simulated_predictors()`.
    """

    planner: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of one method on one trace: time in draft steps of one row, speed over plain decoding, and counters.

    Plain decoding is that of the target without drafts.
    """

    method: Method
    elapsed_s: float
    speedup: float
    stats: Stats

    def as_json(self) -> dict[str, Any]:
        """Return the results as a JSON dict; numbers of drafted tokens are per emitted token.

        `losing` counts rolled-back tokens on branches that were not the draft's first choice, which papers leave out.
        """
        stats = self.stats
        return {
            "speedup": self.speedup,
            "emitted_per_round": stats.emitted_per_round,
            "hit_rate": stats.hit_rate,
            "rolled_back": {cause: getattr(stats, cause) / stats.emitted for cause in CAUSES},
            "losing": stats.losing / stats.emitted,
            "used": stats.used / stats.emitted,
            "rollback_rate": stats.rollback_rate,
            "rollback_rate_with_losing": stats.rollback_rate_with_losing,
            "wait_share": stats.wait_share,
            "rows_per_round": stats.rows_per_round,
        }


def simulated_predictors() -> tuple[str, ...]:
    """Return the names of all predictors that a simulation can use, with those of other packages.

    `random` predicts by chance, `oracle` correctly; `hrad` repeats the signals that were recorded in the trace.
    """
    load_extensions()
    return (*predictor_names(), "random", "oracle", TRAINED)


def method_for(
    planner: str, pair: ModelPair, predictor: str = "confidence", as_in_paper: bool = True, has_text: bool = False
) -> Method:
    """Return the method to simulate a planner for a pair, with the pair's `gamma` and, for `ssd`, its acceptance rate.

    With `as_in_paper`, planner `specbranch` gets the paper's settings. Otherwise it runs as in the service: the target
    does not wait after a miss, and the draft runs only rows that give enough acceptance probability for their time.
    `has_text`: the trace has real sequences with prompts; without it, n-gram lookup in the text is off. `predictor` is
    one of `simulated_predictors()`.
    """
    load_extensions()
    names = setting_names(planner)
    settings: dict[str, Any] = {"gamma": pair.gamma} if "gamma" in names else {}
    if "acceptance" in names:
        settings["acceptance"] = min(max(pair.acceptance, 0.01), 0.99)
    # Tokens of a synthetic trace mean nothing, so guesses from them only cost time. No trace has past answers.
    unused = ("uses_memory",) if has_text else ("uses_text", "uses_memory")
    settings |= {name: False for name in unused if name in names}
    if planner == "specbranch" and as_in_paper:
        settings |= {"wait_for_draft": True, "cost_aware": False, "confidence": PAPER_CONFIDENCE}
    return Method(planner, settings, predictor)


def simulate(
    trace: Trace,
    planner: str | Method,
    layout: Layout | None = None,
    seed: int = 0,
    *,
    c: float | None = None,
    gamma: int | None = None,
    row_cost: float = 0.0,
    batch: int = 1,
    observe: Callable[[Step], None] = lambda step: None,
    costs: PairModel | None = None,
    deadline_s: float = math.inf,
) -> SimulationResult:
    """Decode every answer of a trace in virtual time, `batch` at once; return speed over plain decoding and counters.

    `planner` is a `Method`, or the name of a planner. The latter is simulated as in the service, with `c` rounded as
    its longest submission, so that planners which are compared have the same; `gamma` sets another, for a `Method` too.
    `c` is the time of a target step divided by that of a draft step of one row, `row_cost` the time of each further
    row; give a `Layout` instead to set more. `costs` learns step times and acceptance from all sessions; None: a new
    one. `observe` is called with each finished step. The target waits for drafts up to `deadline_s`. All times are in
    draft steps of one row.
    """
    if layout is None:
        if c is None:
            raise SettingError("say how much slower a target step is than a draft step: c=6, or a Layout")
        layout = Layout(c, row_cost, batch)
    method = _method(planner, trace, layout, gamma)
    load_extensions()
    if method.predictor == TRAINED:
        _refuse_unforeseen(trace)
    costs = costs or PairModel()
    chance = SeededRandom(random.Random(seed))
    target = ScriptedTarget(ReplayTarget(trace), layout.target, chance, entry_s=layout.entry_cost)
    draft = SimulatedDraft(ScriptedEngine(ReplayDraft(trace), row_limit=_ROW_LIMIT), layout.draft)
    chance = SeededRandom(random.Random(seed + 1))
    elapsed_s, plain_s, stats = 0.0, 0.0, Stats()
    for start in range(0, len(trace.answers), layout.batch):
        group = trace.answers[start : start + layout.batch]
        sessions = []
        for index, answer in enumerate(group, start=start):
            own = make_planner(method.planner, method.settings, _predictor(method, answer, chance))
            ending = StopCondition(max_new_tokens=len(answer.tokens))
            sessions.append(Session(prompt_of(trace, index), own, GreedyPicker(), costs, ending))
        elapsed_s += Loop(sessions, target, draft, costs, deadline_s, observe).run()
        plain_s += _plain_s(group, layout)
        for session in sessions:
            stats.add(session.stats)
    return SimulationResult(method, elapsed_s, plain_s / elapsed_s, stats)


def _method(planner: str | Method, trace: Trace, layout: Layout, gamma: int | None) -> Method:
    if isinstance(planner, Method):
        return planner if gamma is None else replace(planner, settings={**planner.settings, "gamma": gamma})
    pair = ModelPair("trace", layout.c, gamma or window_for(layout.c), trace.match_share(), "")
    return method_for(planner, pair, as_in_paper=False, has_text=trace.has_prompts)


def _plain_s(batch: Sequence[Answer], layout: Layout) -> float:
    """Return the time in which the target alone generates all answers of a batch."""
    lengths = [len(answer.tokens) for answer in batch]
    return sum(layout.target.at(sum(length > position for length in lengths)) for position in range(max(lengths)))


def best_gamma(trace: Trace, method: Method, layout: Layout, seed: int = 0, longest: int = 12) -> SimulationResult:
    """Simulate a method with each `gamma` from 1 to `longest`, and return the fastest result.

    A method whose settings have no `gamma` is simulated once.
    """
    if "gamma" not in method.settings:
        return simulate(trace, method, layout, seed)
    tries = (replace(method, settings={**method.settings, "gamma": gamma}) for gamma in range(1, longest + 1))
    return max((simulate(trace, candidate, layout, seed) for candidate in tries), key=lambda out: out.speedup)


def _refuse_unforeseen(trace: Trace) -> None:
    """Raise `TraceError` if an answer of the trace lacks H-RAD's signals, which the predictor `hrad` replays."""
    without = sum(len(answer.foreseen) != len(answer.tokens) for answer in trace.answers)
    if without:
        raise TraceError(
            f"predictor 'hrad' repeats recorded signals, and {without} of {len(trace.answers)} answers of this trace "
            "have none (`foreseen`); replay a trace that has them, or choose another predictor"
        )


def _predictor(method: Method, answer: Answer, chance: SeededRandom) -> Predictor:
    num_before = 1 + len(answer.prompt)  # position 0 is the answer's index, then comes the prompt
    if method.predictor == "random":
        return RandomPredictor(chance)
    if method.predictor == "oracle":
        runs = answer.runs()
        return OraclePredictor(lambda position: runs[position - num_before], method.settings.get("gamma", 8))
    if method.predictor == TRAINED:
        return ReplayPredictor([Signal(signal) for signal in answer.foreseen], num_before)
    return make_predictor(method.predictor)
