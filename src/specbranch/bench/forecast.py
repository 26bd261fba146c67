"""Forecast speeds from a survey: simulate every planner with the measured costs and the recorded distributions."""

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
_MAX_GAMMA = 8  # the longest draft length to try


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The step costs of both devices in seconds, and by how much the draft's work slows the target."""

    target: StepCost  # by tokens in the batch, while the draft works
    draft: StepCost  # by rows
    slowdown: float  # the target's step time while the draft works, divided by its step time alone
    overheads: Mapping[int, float] = field(default_factory=dict)  # by batch: step time with our proposer / bare vLLM's
    entry_s: float = 0.0  # the fixed cost of a step with several tokens, which may use another kernel

    def overhead(self, batch: int) -> float:
        """Return the step time with our proposer but without drafts, divided by bare vLLM's.

        The ratio is that of the nearest measured batch size, or 1 if no batch size was measured.
        """
        return self.overheads[min(self.overheads, key=lambda size: abs(size - batch))] if self.overheads else 1.0

    @property
    def c(self) -> float:
        """The target's step time with one token divided by the draft's with one row."""
        return self.target.base_s / self.draft.base_s

    def layout(self, batch: int, sharing: float = 1.0) -> Layout:
        """Return the simulator's `Layout` (its devices) with these costs; the unit of time is a draft step of one row.

        `batch` is the number of requests that a target decodes at once, and `sharing` the number of targets that one
        draft device serves; below 1, one target has several draft devices.
        """
        unit_s = self.draft.base_s
        is_alone = batch == 1  # several sequences pay the entry cost with and without drafts
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
    """The forecast for one method: its `speed` of decoding relative to the target alone, without prefill."""

    concurrency: int
    method: Method
    speed: float

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON dict."""
        settings = dict(self.method.settings)
        return {
            "concurrency": self.concurrency,
            "planner": self.method.planner,
            "settings": settings,
            "speed": self.speed,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """All forecasts from one survey, and the measured costs on which they rest (`terms`)."""

    terms: MeasuredCosts
    forecasts: Sequence[Forecast]  # for every planner at every concurrency
    with_two_drafts: float  # speed of the best planner at the lowest concurrency, with two draft devices
    with_shared_draft: float  # the same with one draft device for two such targets

    @property
    def concurrencies(self) -> list[int]:
        """All concurrencies of the forecasts, in ascending order."""
        return sorted({forecast.concurrency for forecast in self.forecasts})

    def best_at(self, concurrency: int) -> Forecast:
        """Return the forecast of the fastest planner at a concurrency: planner `none` if all others are slower."""
        return max((one for one in self.forecasts if one.concurrency == concurrency), key=lambda one: one.speed)

    def stops_at(self, min_gain: float) -> int | None:
        """Return the lowest concurrency at which every planner's speed is below bare vLLM's times 1 + `min_gain`.

        Return None if some planner is at least that fast at every concurrency.
        """
        for concurrency in self.concurrencies:
            if self.best_at(concurrency).speed < 1 + min_gain:
                return concurrency
        return None

    def as_json(self) -> dict[str, Any]:
        """Return all figures as a JSON dict."""
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
    """The survey with the target in one data type, and the forecasts from it; used to compare data types."""

    dtype: str
    survey: Survey
    advice: Advice

    @property
    def best(self) -> Forecast:
        """The forecast of the fastest planner that drafts, at the lowest concurrency."""
        few = self.advice.concurrencies[0]
        drafting = [one for one in self.advice.forecasts if one.method.planner != _NONE and one.concurrency == few]
        return max(drafting, key=lambda one: one.speed, default=self.advice.best_at(few))

    @property
    def bare_per_s(self) -> float:
        """Tokens per second of bare vLLM for one request, at the lowest concurrency."""
        alone_s = self.survey.target_alone_s
        sizes = sorted(alone_s)
        return 1 / float(np.interp(self.advice.concurrencies[0], sizes, [alone_s[size] for size in sizes]))

    @property
    def best_per_s(self) -> float:
        """Tokens per second of the fastest planner for one request, at the lowest concurrency."""
        return self.bare_per_s * self.best.speed

    def as_json(self) -> dict[str, Any]:
        """Return the speeds and the survey as a JSON dict."""
        return {
            "dtype": self.dtype,
            "bare_tokens_per_s": self.bare_per_s,
            "tokens_per_s": self.best_per_s,
            "planner": self.best.method.planner,
            "survey": self.survey.as_json(),
        }


def fastest(types: Sequence[TypeForecast]) -> TypeForecast:
    """Return the forecast of the data type that has the most tokens per second with drafts."""
    return max(types, key=lambda one: one.best_per_s)


def fastest_bare(types: Sequence[TypeForecast]) -> TypeForecast:
    """Return the forecast of the data type that had the most tokens per second without drafts."""
    return max(types, key=lambda one: one.bare_per_s)


def measured_costs(survey: Survey) -> MeasuredCosts:
    """Return the costs of target and draft: straight lines through the measured step times, with slopes of at least 0.

    The target's line is fitted to its steps of several tokens, because a step of one token may use another kernel.
    """
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
    """Simulate one method with its own settings on a trace, and return the forecast of its speed.

    `terms` are the measured costs, `batch` is the number of requests that a target decodes at once, and `sharing` the
    number of targets that one draft device serves.
    """
    if method.planner == _NONE:
        return Forecast(batch, method, 1.0)
    outcome = simulate(_repeated(trace, batch), method, terms.layout(batch, sharing))
    return Forecast(batch, method, outcome.speedup / terms.slowdown / terms.overhead(batch))


def advise(survey: Survey, planners: Sequence[str], concurrencies: Sequence[int]) -> Advice:
    """Forecast the speed of every planner, with its best draft length, at every concurrency; return all forecasts.

    For the planner that is fastest at the lowest concurrency, also forecast the speed with two draft devices, and with
    one draft device for two targets.
    """
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
    acceptance = min(max(trace.match_share(), 0.01), 0.99)  # a short survey may measure 0 or 1
    pair = ModelPair("surveyed", layout.c, _MAX_GAMMA, acceptance, "", row_cost=layout.row_cost)
    method = method_for(planner, pair, as_in_paper=False, has_text=trace.has_prompts)
    if planner == _NONE:
        return forecast_speeds(trace, method, terms, batch, sharing)
    if "cost_aware" in setting_names(planner):  # such a planner chooses the draft length itself
        longest = replace(method, settings={**method.settings, "gamma": draft_length_limit(planner)})
        return forecast_speeds(trace, longest, terms, batch, sharing)
    outcome = best_gamma(_repeated(trace, batch), method, layout, longest=_MAX_GAMMA)
    return Forecast(batch, outcome.method, outcome.speedup / terms.slowdown / terms.overhead(batch))


def _repeated(trace: Trace, count: int) -> Trace:
    """Return a trace with its answers repeated until there are at least `count`."""
    copies = -(-count // len(trace.answers))
    return replace(trace, answers=trace.answers * copies)
