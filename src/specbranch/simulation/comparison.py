"""Compare planners on one pair of models, and sweep a parameter of the pair or a setting of the planners."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbranch.core.planner import Bounds
from specbranch.core.planners import PLANNERS, SettingError, setting_names, suggest
from specbranch.core.round import MAX_WINDOW
from specbranch.simulation.presets import ModelPair, make_trace, window_for
from specbranch.simulation.simulate import Layout, Method, SimulationResult, best_gamma, method_for, simulate
from specbranch.trace import Trace

ANSWER_LEN = 250
BOUNDS = {
    "c": Bounds(0.01, 1000),
    "gamma": Bounds(1, MAX_WINDOW),
    "row_cost": Bounds(0, 100),
    "acceptance": Bounds(0, 1, is_open=True),
    "correlation": Bounds(0, 0.95),
    "batch": Bounds(1, 1024),
}
_WHOLE = ("gamma", "batch")
_OF_TRACE = ("acceptance", "correlation")  # which a recorded trace fixes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerComparison:
    """The planners to compare, and the pair on which they are simulated.

    `recorded` is the trace to replay; without one, a trace of `num_tokens` tokens is made for the pair. `settings`
    holds settings of the planners, such as `confidence` for each planner that has it, or `specbranch.confidence` for
    one. `has_best_gamma`: give every planner its own best gamma. The rest is as in `method_for` and `simulate`.
    """

    pair: ModelPair
    recorded: Trace | None = None
    num_tokens: int = 5000
    seed: int = 0
    batch: int = 1
    planners: Sequence[str] = PLANNERS
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    as_in_paper: bool = False
    has_best_gamma: bool = False

    @property
    def layout(self) -> Layout:
        """The step times of the two simulated devices."""
        return Layout(self.pair.c, self.pair.row_cost, self.batch)

    def trace(self) -> Trace:
        """Return the recorded trace, or make one for the pair."""
        if self.recorded is not None:
            return self.recorded
        num_answers, length = max(1, self.num_tokens // ANSWER_LEN), min(self.num_tokens, ANSWER_LEN)
        return make_trace(self.pair, num_answers, length, random.Random(self.seed))

    def method(self, planner: str) -> Method:
        """Return the method to simulate for a planner, with those of `settings` that are meant for it."""
        has_text = self.recorded is not None and self.recorded.has_prompts
        method = method_for(planner, self.pair, self.predictor, self.as_in_paper, has_text)
        own = {key.rpartition(".")[2]: value for key, value in self.settings.items() if self._is_for(planner, key)}
        return replace(method, settings={**method.settings, **own})

    def with_value(self, name: str, value: Any) -> PlannerComparison:
        """Return the same comparison with another value of a parameter of the pair, of `batch` or of a setting.

        With another `c`, gamma becomes that value rounded. Raise `SettingError` for an unknown name, and if a recorded
        trace fixes the parameter.
        """
        if name in _OF_TRACE and self.recorded is not None:
            raise SettingError(f"a recorded trace has its own {name}; sweep it without a trace")
        if name in BOUNDS:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not BOUNDS[name].hold(value) or (name in _WHOLE and not isinstance(value, int)):
                kind = "whole number" if name in _WHOLE else "number"
                raise SettingError(f"{name} is {value!r}; give a {kind} {BOUNDS[name]}")
        if name == "batch":
            return replace(self, batch=value)
        if name == "c":
            return replace(self, pair=replace(self.pair, c=float(value), gamma=window_for(value)))
        if name in BOUNDS:
            return replace(self, pair=replace(self.pair, **{name: value}))
        changed = replace(self, settings={**self.settings, name: value})
        changed.check()
        return changed

    def check(self) -> None:
        """Raise `SettingError` if a setting is known to none of the planners."""
        for key in self.settings:
            if not any(self._is_for(planner, key) for planner in self.planners):
                owner, _, name = key.rpartition(".")
                asked = [owner] if owner in self.planners else self.planners
                known = sorted({name for planner in asked for name in setting_names(planner)})
                raise SettingError(
                    f"none of the planners {', '.join(asked)} has a setting {name!r}; {suggest(name, known)}"
                )

    def run(self, show: Callable[[str], None] = lambda planner: None) -> dict[str, SimulationResult]:
        """Simulate every planner, and return the results by planner; call `show` with each planner before it runs."""
        self.check()
        trace, results = self.trace(), {}
        for planner in self.planners:
            show(planner)
            run = best_gamma if self.has_best_gamma else simulate
            results[planner] = run(trace, self.method(planner), self.layout, self.seed)
        return results

    @staticmethod
    def _is_for(planner: str, key: str) -> bool:
        owner, _, name = key.rpartition(".")
        return owner in ("", planner) and name in setting_names(planner)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A parameter of a comparison, and the values to give it."""

    name: str
    values: Sequence[Any]

    def run(
        self, comparison: PlannerComparison, show: Callable[[str, Any], None] = lambda planner, value: None
    ) -> list[dict[str, SimulationResult]]:
        """Run the comparison with each value; call `show` with each planner and value before they are simulated."""
        changed = [comparison.with_value(self.name, value) for value in self.values]  # fails before the first run
        return [
            one.run(lambda planner, value=value: show(planner, value))  # type: ignore[misc]
            for one, value in zip(changed, self.values, strict=True)
        ]
