"""Plot simulations with Matplotlib: the first rounds of draft and target over time, and speed against a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbranch.extensions import load_pyplot
from specbranch.simulation.comparison import PlannerComparison, Sweep
from specbranch.simulation.loop import DraftStep, Step, TargetStep
from specbranch.simulation.simulate import SimulationResult, simulate
from specbranch.trace import Trace

_USED, _LOST, _TARGET, _WAIT = "#2a9d8f", "#e9c9b1", "#264653", "#f4f1ea"
_HIT, _MISS = "#2a9d8f", "#d1495b"
_CURVES = ("#8d99ae", "#6a4c93", "#1982c4", "#d1495b", "#f4a261", "#2a9d8f", "#264653")

_RATIOS = (2, 3, 4, 5, 6, 8, 10, 12, 16)


def plot_comparison(path: Path, comparison: PlannerComparison, trace: Trace) -> None:
    """Simulate the planners, and draw their first rounds, and their speeds against c, to one file.

    The suffix of `path` sets the format. `trace` is the comparison's.
    """
    pyplot = load_pyplot()
    shown = [name for name in comparison.planners if name != "none"]
    heights = [1.0] * len(shown) + [3.2]
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(12, 1.15 * len(shown) + 4.6),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    horizon_s = comparison.pair.c * 9
    for axis, name in zip(axes[:-1, 0], shown, strict=True):
        _draw_lanes(axis, name, _first_steps(comparison, trace, name), horizon_s)
    if shown:
        axes[len(shown) - 1, 0].set_xlabel("time, in draft steps of one row")
        _draw_legend(axes[0, 0], comparison.pair.name)
    short = replace(comparison, recorded=replace(trace, answers=trace.answers[:8]), has_best_gamma=False)
    sweep = Sweep("c", _RATIOS)
    axis = axes[-1, 0]
    _draw_sweep(axis, sweep, sweep.run(short))
    axis.set_title("Speed over plain decoding against c (window gamma = c)", loc="left", fontweight="bold")
    axis.set_xlabel("c: target step time / draft step time")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def plot_sweep(
    path: Path, comparison: PlannerComparison, sweep: Sweep, points: Sequence[Mapping[str, SimulationResult]]
) -> None:
    """Draw the speed of each planner against the parameter of a sweep; the suffix of `path` sets the format.

    `points` holds the results for each value of the sweep.
    """
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    _draw_sweep(axis, sweep, points)
    axis.set_title(f"{comparison.pair.name}: speed over plain decoding", loc="left", fontweight="bold")
    axis.set_xlabel("c: target step time / draft step time" if sweep.name == "c" else sweep.name)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _first_steps(comparison: PlannerComparison, trace: Trace, planner: str) -> list[Step]:
    steps: list[Step] = []
    short = replace(trace, answers=trace.answers[:1])
    simulate(short, comparison.method(planner), replace(comparison.layout, batch=1), observe=steps.append)
    return steps


def _draw_lanes(axis: Any, name: str, steps: list[Step], horizon_s: float) -> None:
    for step in steps:
        if step.start_s > horizon_s:
            continue
        if isinstance(step, DraftStep):
            _draw_draft_step(axis, step)
        else:
            _draw_target_step(axis, step)
    axis.set_xlim(0, horizon_s)
    axis.set_ylim(-0.1, 2.25)
    axis.set_yticks([0.5, 1.5], ["target", "draft"])
    axis.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=12, fontweight="bold")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _draw_draft_step(axis: Any, step: DraftStep) -> None:
    """Draw a box for each row of a step; its color says whether a token drawn after the row's node was committed."""
    width = step.end_s - step.start_s
    height = 0.9 / len(step.nodes)
    for index, node in enumerate(step.nodes):
        color = _USED if node.has_committed_child else _LOST
        axis.add_patch(
            _box(step.start_s, 1.05 + index * height, width, height, color, line=1.2 / (1 + len(step.nodes)))
        )


def _draw_target_step(axis: Any, step: TargetStep) -> None:
    if step.wait_s:
        axis.add_patch(_box(step.start_s - step.wait_s, 0.05, step.wait_s, 0.9, _WAIT, hatch="////"))
    axis.add_patch(_box(step.start_s, 0.05, step.end_s - step.start_s, 0.9, _TARGET))
    submitted, accepted, is_hit = step.submitted[0], step.verdicts[0].accepted, step.hits[0]
    middle = (step.start_s + step.end_s) / 2
    axis.text(middle, 0.5, f"{accepted}/{submitted} +1", color="white", ha="center", va="center", fontsize=7)
    axis.plot(
        step.end_s, 1.0, marker="o" if is_hit else "X", color=_HIT if is_hit else _MISS, ms=7, mec="white", zorder=5
    )


def _box(
    x: float, y: float, width: float, height: float, color: str, hatch: str | None = None, line: float = 0.6
) -> Any:
    from matplotlib.patches import Rectangle

    edge = "#b5a99a" if hatch else "white"
    return Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=line, hatch=hatch)


def _draw_legend(axis: Any, title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Patch(color=_USED, label="draft row, its token committed"),
        Patch(color=_LOST, label="draft row, rolled back"),
        Patch(color=_TARGET, label="target step: accepted/submitted + its own"),
        Patch(facecolor=_WAIT, edgecolor="#b5a99a", hatch="////", label="target waits"),
        Line2D([], [], marker="o", color=_HIT, ls="", label="hit"),
        Line2D([], [], marker="X", color=_MISS, ls="", label="miss"),
    ]
    axis.set_title(f"{title}: the first rounds", loc="left", fontweight="bold", pad=30)
    axis.legend(handles=entries, ncols=6, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8)


def _draw_sweep(axis: Any, sweep: Sweep, points: Sequence[Mapping[str, SimulationResult]]) -> None:
    """Draw a curve for each planner; values that are not numbers stand side by side."""
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in sweep.values)
    places = list(sweep.values) if are_numbers else list(range(len(sweep.values)))
    for index, name in enumerate(points[0]):
        axis.plot(
            places,
            [results[name].speedup for results in points],
            "--" if name == "none" else "-",
            color=_CURVES[index % len(_CURVES)],
            marker="o",
            ms=4,
            label=name,
            lw=2.4 if name == "specbranch" else 1.5,
        )
    if not are_numbers or len(places) <= 12:
        axis.set_xticks(places, [str(value) for value in sweep.values])
    axis.set_ylabel("speed")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, ncols=2)
