"""A forecast from a survey: the simulator with the measured costs and the recorded distributions, for every planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from specbranch.bench.profile import fit_line
from specbranch.bench.survey import Survey
from specbranch.core.costs import StepCost
from specbranch.core.planners import draft_length_limit, setting_names
from specbranch.simulation.presets import ModelPair
from specbranch.simulation.simulate import Layout, Method, best_gamma, method_for, simulate
from specbranch.trace import Trace

_NONE = "none"
_LONGEST = 8  # window that is tried


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What the two devices cost, in seconds, and by how much the draft's work slows the target."""

    target: StepCost  # by tokens in the batch, while the draft works
    draft: StepCost  # by rows
    slowdown: float  # the target's step beside the draft over its step alone
    overheads: Mapping[int, float] = field(default_factory=dict)  # a step with our proposer over one of bare vLLM
    entry_s: float = 0.0  # a step of several tokens beyond what its tokens cost: it may run by another kernel

    def overhead(self, batch: int) -> float:
        """By how much our proposer alone makes a step longer: as measured with the most similar batch."""
        return self.overheads[min(self.overheads, key=lambda size: abs(size - batch))] if self.overheads else 1.0

    @property
    def c(self) -> float:
        """Target step time over draft step time."""
        return self.target.base_s / self.draft.base_s

    def layout(self, batch: int, sharing: float = 1.0) -> Layout:
        """The same in draft steps of one row."""
        unit_s = self.draft.base_s
        is_alone = batch == 1  # several sequences have that kind of step with and without drafts
        return Layout(
            self.c if is_alone else self.c + self.entry_s / unit_s,
            self.draft.per_row_s / unit_s,
            batch,
            self.target.per_row_s / unit_s,
            sharing,
            self.entry_s / unit_s if is_alone else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The speed of a method over the target alone, while sequences are decoded; reading prompts is not in it."""

    concurrency: int
    method: Method
    speed: float

    def as_json(self) -> dict[str, Any]:
        """The forecast as a plain document."""
        settings = dict(self.method.settings)
        return {
            "concurrency": self.concurrency,
            "planner": self.method.planner,
            "settings": settings,
            "speed": self.speed,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """What a survey says to its owner."""

    terms: MeasuredCosts
    forecasts: Sequence[Forecast]  # of every planner at every concurrency
    with_two_drafts: float  # speed of the best one at the least concurrency, with two draft devices
    with_shared_draft: float  # and with one draft device for two such targets

    @property
    def concurrencies(self) -> list[int]:
        """All that were asked for, in order."""
        return sorted({forecast.concurrency for forecast in self.forecasts})

    def best_at(self, concurrency: int) -> Forecast:
        """The fastest planner at a concurrency; `none` if nothing pays."""
        return max((one for one in self.forecasts if one.concurrency == concurrency), key=lambda one: one.speed)

    def stops_at(self, least_gain: float) -> int | None:
        """The first concurrency at which nothing is faster than bare vLLM by so much; None if it always pays."""
        for concurrency in self.concurrencies:
            if self.best_at(concurrency).speed < 1 + least_gain:
                return concurrency
        return None

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        terms = self.terms
        return {
            "c": terms.c,
            "row_cost": terms.draft.share_of_more,
            "entry_cost": terms.entry_s / terms.target.base_s,
            "slowdown": terms.slowdown,
            "overheads": {str(size): overhead for size, overhead in terms.overheads.items()},
            "forecasts": [forecast.as_json() for forecast in self.forecasts],
            "with_two_drafts": self.with_two_drafts,
            "with_shared_draft": self.with_shared_draft,
        }


@dataclass(frozen=True, slots=True)
class TypeForecast:
    """What one data type of the target gives: its survey, the advice from it, and speeds that types share."""

    dtype: str
    survey: Survey
    advice: Advice

    @property
    def best(self) -> Forecast:
        """The fastest planner that drafts, at the least concurrency."""
        few = self.advice.concurrencies[0]
        drafting = [one for one in self.advice.forecasts if one.method.planner != _NONE and one.concurrency == few]
        return max(drafting, key=lambda one: one.speed, default=self.advice.best_at(few))

    @property
    def bare_per_s(self) -> float:
        """Tokens that bare vLLM decodes in a second for one request, at the least concurrency."""
        alone_s = self.survey.target_alone_s
        sizes = sorted(alone_s)
        return 1 / float(np.interp(self.advice.concurrencies[0], sizes, [alone_s[size] for size in sizes]))

    @property
    def best_per_s(self) -> float:
        """The same with the fastest planner."""
        return self.bare_per_s * self.best.speed

    def as_json(self) -> dict[str, Any]:
        """The speeds, and what was measured for them."""
        return {
            "dtype": self.dtype,
            "bare_tokens_per_s": self.bare_per_s,
            "tokens_per_s": self.best_per_s,
            "planner": self.best.method.planner,
            "survey": self.survey.as_json(),
        }


def fastest(types: Sequence[TypeForecast]) -> TypeForecast:
    """The data type that is forecast to be fastest with drafts, in tokens per second."""
    return max(types, key=lambda one: one.best_per_s)


def fastest_bare(types: Sequence[TypeForecast]) -> TypeForecast:
    """The data type that was fastest without drafts."""
    return max(types, key=lambda one: one.bare_per_s)


def measured_costs(survey: Survey) -> MeasuredCosts:
    """Straight lines through what was measured; neither falls. The target's is through its steps of several tokens."""
    alone_s = survey.target_alone_s
    several_s = {size: step_s for size, step_s in alone_s.items() if size > 1}
    several, draft = fit_line(several_s if len(several_s) > 1 else alone_s).cost, fit_line(survey.draft_s).cost
    slowdown = max(1.0, survey.target_beside_s / alone_s[1])
    target = StepCost(alone_s[1] * slowdown, max(several.per_row_s, 0.0) * slowdown)
    first_s = several.base_s if several.per_row_s > 0 else fmean(several_s.values() or alone_s.values())
    entry_s = max(first_s - alone_s[1], 0.0) * slowdown
    overheads = {size: max(1.0, step_s / alone_s[size]) for size, step_s in survey.hooked_s.items()}
    return MeasuredCosts(target, StepCost(survey.draft_s[1], max(draft.per_row_s, 0.0)), slowdown, overheads, entry_s)


def forecast_speeds(
    trace: Trace, method: Method, terms: MeasuredCosts, batch: int = 1, sharing: float = 1.0
) -> Forecast:
    """The forecast for one method as it is."""
    if method.planner == _NONE:
        return Forecast(batch, method, 1.0)
    outcome = simulate(_at_least(trace, batch), method, terms.layout(batch, sharing))
    return Forecast(batch, method, outcome.speedup / terms.slowdown / terms.overhead(batch))


def advise(survey: Survey, planners: Sequence[str], concurrencies: Sequence[int]) -> Advice:
    """Forecasts for planners, each at the window that suits it, and what other numbers of devices would change."""
    terms = measured_costs(survey)
    forecasts = [
        _best(survey.trace, planner, terms, concurrency) for concurrency in concurrencies for planner in planners
    ]
    few = min(concurrencies)
    best = max((one for one in forecasts if one.concurrency == few), key=lambda one: one.speed)
    more, shared = (_best(survey.trace, best.method.planner, terms, few, sharing).speed for sharing in (0.5, 2.0))
    return Advice(terms, forecasts, more, shared)


def _best(trace: Trace, planner: str, terms: MeasuredCosts, batch: int, sharing: float = 1.0) -> Forecast:
    layout = terms.layout(batch, sharing)
    acceptance = min(max(trace.match_share(), 0.01), 0.99)  # a short survey may show none or all
    pair = ModelPair("surveyed", layout.c, _LONGEST, acceptance, "", row_cost=layout.row_cost)
    method = method_for(planner, pair, as_in_paper=False, has_text=trace.has_prompts)
    if planner == _NONE:
        return Forecast(batch, method, 1.0)
    answers = _at_least(trace, batch)
    if "cost_aware" in setting_names(planner):  # it finds the right length itself
        longest = replace(method, settings={**method.settings, "gamma": draft_length_limit(planner)})
        outcome = simulate(answers, longest, layout)
    else:
        outcome = best_gamma(answers, method, layout, longest=_LONGEST)
    return Forecast(batch, outcome.method, outcome.speedup / terms.slowdown / terms.overhead(batch))


def _at_least(trace: Trace, count: int) -> Trace:
    """The trace with its answers repeated until there are enough for a batch."""
    copies = -(-count // len(trace.answers))
    return replace(trace, answers=trace.answers * copies)
