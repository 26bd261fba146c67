"""Figures of reports and timelines, drawn with matplotlib."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from specbranch.bench.results import Line, Ratio, Results, mean_speeds, summarize
from specbranch.bench.scenario import BARE, BenchMethod
from specbranch.bench.timeline import Timeline, TimelineTarget, TimeSpan, time_shares
from specbranch.extensions import load_pyplot

_OURS = {
    "none": "#b7c9c6",
    "sps": "#9ad1c7",
    "adaedl": "#e9c46a",
    "pearl": "#f4a261",
    "ssd": "#e76f51",
    "specbranch": "#14746f",
    "budget": "#0b3c49",
}
_OTHERS = (
    "#6a4c93", "#457b9d", "#d1495b", "#b5651d", "#7cb518", "#c77dff", "#00a6fb", "#ff70a6", "#5c677d", "#a7c957"
)  # fmt: skip
CAPTIONS = {
    "speed": "Speed over bare vLLM; whiskers, from three trials on: 95 % of resamples of the prompts",
    "load": "Speed over bare vLLM against requests at once",
    "hits": "Hit rate against draft rows a round",
    "rates": "Time per token against requests a second",
}
_Drawer = Callable[[Any], None]
_BARE_COLOR = "#8d99ae"
_MIN_HITS = 0.05
_TARGET, _WAIT, _PREFILL = "#264653", "#d1495b", "#d9d9d9"
_HIT, _MISS = "#2a9d8f", "#d1495b"
_DRAFT_PREFILL = "#c9b79c"
_ROWS = ("#bfe3dd", "#7fcabd", "#2a9d8f", "#1b6f65")  # for 1 row, 2, 3 or 4, more
_ROW_STEPS = (1, 2, 4)
_ROW_LABELS = ("1 row", "2 rows", "3-4 rows", "5 rows or more")
_MAX_PANELS = 6
_LABEL_SHARE = 0.022  # a bar at least this wide, as a share of the figure, has room for numbers


def draw_figures(results: Results, directory: Path, stem: str) -> list[tuple[str, Path]]:
    """Draw all figures of the results into a directory, as SVG and PNG files whose names begin with `stem`.

    Return the caption and the path of each SVG.
    """
    pyplot = load_pyplot()
    drawn = []
    for name, draw in _drawers(results).items():
        if draw is None:
            continue
        figure, axis = pyplot.subplots(figsize=(10, 3.8), layout="constrained")
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
        path = directory / f"{stem}-{name}.svg"
        # No date and no random names, so that the same results give the same file.
        with pyplot.rc_context({"svg.hashsalt": stem}):
            figure.savefig(path, metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=110)
        pyplot.close(figure)
        drawn.append((CAPTIONS[name], path))
    return drawn


def _drawers(results: Results) -> dict[str, _Drawer | None]:
    if results.scenario.served is not None:
        return {"rates": _rate_drawer(results)}
    lines = summarize(results)
    return {"speed": _speed_drawer(results, lines), "load": _load_drawer(results), "hits": _hits_drawer(results, lines)}


def _speed_drawer(results: Results, lines: Sequence[Line]) -> _Drawer | None:
    """Return a function that draws bars of speeds, grouped by task, and one more group for the mean of several tasks.

    Return None if there is no method besides bare vLLM.
    """
    alone = min(results.scenario.concurrency)
    shown = [line for line in lines if line.concurrency == alone]
    groups = list(dict.fromkeys(line.task for line in shown))
    speeds: dict[str, dict[str, Ratio]] = {}
    for line in shown:
        speeds.setdefault(line.method, {})[line.task] = line.speed
    if len(groups) > 1:
        groups.append("mean")
        for method, ratio in mean_speeds(results)[alone].items():
            speeds[method]["mean"] = ratio
    methods = [name for name in speeds if name != BARE]
    if not methods:
        return None

    def draw(axis: Any) -> None:
        width = 0.84 / len(methods)
        for place, method in enumerate(methods):
            found = [(at, speeds[method][group]) for at, group in enumerate(groups) if group in speeds[method]]
            lefts = [at - 0.42 + width * (place + 0.5) for at, _ in found]
            values = [ratio.value for _, ratio in found]
            below, above = _ends([ratio for _, ratio in found])
            errors = np.maximum([values - below, above - values], 0.0).tolist()
            axis.bar(lefts, values, width * 0.92, color=_color(results, method), label=_label(results, method))
            axis.errorbar(lefts, values, errors, fmt="none", ecolor="#333333", elinewidth=0.9)
        axis.axhline(1.0, color=_BARE_COLOR, lw=1.2, ls="--")
        axis.set_xticks(range(len(groups)), groups)
        axis.tick_params(axis="x", length=0)
        axis.set_ylabel("speed over bare vLLM")
        axis.legend(
            frameon=False, ncols=min(6, len(methods)), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8
        )

    return draw


def _load_drawer(results: Results) -> _Drawer | None:
    if len(results.scenario.concurrency) < 2:
        return None
    by_concurrency = mean_speeds(results)

    def draw(axis: Any) -> None:
        for method in [method.name for method in results.scenario.methods if method.name != BARE]:
            points = [(at, speeds[method]) for at, speeds in sorted(by_concurrency.items()) if method in speeds]
            if not points:
                continue
            places, ratios = [at for at, _ in points], [ratio for _, ratio in points]
            color = _color(results, method)
            axis.plot(places, [r.value for r in ratios], marker="o", color=color, label=_label(results, method))
            axis.fill_between(places, *_ends(ratios), color=color, alpha=0.15, lw=0)
        axis.axhline(1.0, color=_BARE_COLOR, lw=1.2, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_xticks(results.scenario.concurrency, [str(at) for at in results.scenario.concurrency])
        axis.set_xlabel("requests at once")
        axis.set_ylabel("speed over bare vLLM")
        axis.legend(frameon=False, fontsize=8)

    return draw


def _rate_drawer(results: Results) -> _Drawer:
    """Return a function that draws the median time per token against the request rate, with one point for each run."""

    def draw(axis: Any) -> None:
        for method in results.scenario.methods:
            own = [record for record in results.records if record["method"] == method.name]
            rates = sorted({record["rate"] for record in own})
            color = _BARE_COLOR if method.name == BARE else _color(results, method.name)
            means = [fmean(one["times_ms"]["tpot"]["p50"] for one in own if one["rate"] == rate) for rate in rates]
            axis.plot(rates, means, color=color, label=_label(results, method.name))
            axis.scatter(
                [one["rate"] for one in own], [one["times_ms"]["tpot"]["p50"] for one in own], color=color, s=18
            )
        axis.set_xlabel("requests a second")
        axis.set_ylabel("ms per token, p50")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)

    return draw


def _hits_drawer(results: Results, lines: Sequence[Line]) -> _Drawer | None:
    # A method that does not draft ahead has no meaningful hits.
    points = [line for line in lines if (line.hit_rate or 0) > _MIN_HITS and line.rows_per_round]
    if not points:
        return None
    marks = dict(zip(dict.fromkeys(line.task for line in points), "osD^vP*X<>", strict=False))

    def draw(axis: Any) -> None:
        from matplotlib.lines import Line2D

        for line in points:
            axis.scatter(
                line.rows_per_round, line.hit_rate, s=60, marker=marks[line.task], color=_color(results, line.method)
            )
        methods = dict.fromkeys(line.method for line in points)
        entries = [Line2D([], [], marker="s", ls="", color=_color(results, name), label=name) for name in methods]
        entries += [Line2D([], [], marker=mark, ls="", color="#555555", label=task) for task, mark in marks.items()]
        axis.legend(handles=entries, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.set_xlabel("draft rows a round")
        axis.set_ylabel("hit rate")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)

    return draw


def _color(results: Results, name: str) -> str:
    return method_colors(results.scenario.methods)[name]


def method_colors(methods: Sequence[BenchMethod]) -> dict[str, str]:
    """Return a color for each method, by name; the first method of each planner gets the planner's usual color."""
    colors = {BARE: _BARE_COLOR}
    for method in methods:
        usual = _OURS.get(method.planner or "")
        if method.name != BARE and usual is not None and usual not in colors.values():
            colors[method.name] = usual
    spare = cycle(_OTHERS)
    for method in methods:
        if method.name not in colors:
            colors[method.name] = next(spare)
    return colors


def _ends(ratios: Sequence[Ratio]) -> Any:
    """Return the bounds of the ratios' confidence intervals as an array [2, n]: the lower bounds, then the upper ones.

    The bounds of a ratio without an interval are NaN, which is not drawn.
    """
    return np.array([[ratio.low for ratio in ratios], [ratio.high for ratio in ratios]], dtype=float)


def _label(results: Results, name: str) -> str:
    cores = results.scenario.num_cores(results.method(name))
    return f"{name} ({cores} core{'s' if cores > 1 else ''})"


def plot_timeline(path: Path, timeline: Timeline, stretches: list[tuple[float, float]], title: str) -> None:
    """Draw a timeline to a file whose suffix gives the format: the first six targets, one below the other.

    `stretches` has the time range of each target, in seconds.
    """
    pyplot = load_pyplot()
    lanes = list(zip(timeline.targets, stretches, strict=True))[:_MAX_PANELS]
    size = (12, 1.45 * len(lanes) + 1.1)
    figure, axes = pyplot.subplots(len(lanes), 1, figsize=size, layout="constrained", squeeze=False)
    for axis, (lane, stretch) in zip(axes[:, 0], lanes, strict=True):
        _draw_panel(axis, timeline, lane, stretch)
    axes[-1, 0].set_xlabel("time, ms")
    _draw_legend(axes[0, 0], title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def choose_stretches(timeline: Timeline, num_rounds: int) -> list[tuple[float, float]]:
    """Return for each target a time range to draw, in the middle of its rounds, as start and end in seconds.

    All ranges have the same length, about `num_rounds` rounds of the slowest target; a target with fewer rounds shows
    all of them.
    """
    length_s = max(_typical_s(lane) for lane in timeline.targets) * num_rounds
    return [_middle(lane, length_s) for lane in timeline.targets]


def _typical_s(lane: TimelineTarget) -> float:
    """Return the mean seconds per round of the target `lane`, including the waits for drafts."""
    rounds = lane.rounds
    time_s = sum(span.end_s - span.start_s for span in rounds + lane.waits)
    return time_s / len(rounds) if rounds else time_s


def _middle(lane: TimelineTarget, length_s: float) -> tuple[float, float]:
    spans = sorted(lane.rounds + lane.waits, key=lambda span: span.start_s)
    first_s, last_s = spans[0].start_s, spans[-1].end_s
    earliest_s = max(first_s, (first_s + last_s - length_s) / 2)
    start_s = next((step.start_s for step in lane.rounds if step.start_s >= earliest_s), first_s)
    return start_s, start_s + length_s


def _draw_panel(axis: Any, timeline: Timeline, lane: TimelineTarget, stretch: tuple[float, float]) -> None:
    start_s, end_s = stretch
    shown = timeline.between(start_s, end_s)
    here = next((one for one in shown.targets if one.name == lane.name), TimelineTarget(lane.name))
    for draft in shown.drafts:
        axis.add_patch(
            _box(draft, start_s, 1.2, _DRAFT_PREFILL if draft.is_prefill else _ROWS[_shade(draft.args["rows"])])
        )
    for step in here.steps:
        axis.add_patch(_box(step, start_s, 0.0, _PREFILL if step.is_prefill else _TARGET))
        _label_step(axis, step, start_s, end_s - start_s)
    for wait in here.waits:
        axis.add_patch(_box(wait, start_s, 0.0, _WAIT))
    for mark in here.marks:
        at_ms = 1e3 * (mark.at_s - start_s)
        axis.plot([at_ms, at_ms], [0.94, 1.16], color=_HIT if mark.is_hit else _MISS, lw=2.6, solid_capstyle="butt")
    _dress(axis, timeline, lane, 1e3 * (end_s - start_s))


def _box(span: TimeSpan, origin_s: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    x, width = 1e3 * (span.start_s - origin_s), 1e3 * (span.end_s - span.start_s)
    return Rectangle((x, y), width, 0.9, facecolor=color, edgecolor="white", linewidth=0.5)


def _label_step(axis: Any, step: TimeSpan, origin_s: float, length_s: float) -> None:
    if step.is_prefill or step.end_s - step.start_s < _LABEL_SHARE * length_s:
        return
    middle_ms = 1e3 * ((step.start_s + step.end_s) / 2 - origin_s)
    text = f"{step.args['accepted']}/{step.args['submitted']}"
    axis.text(middle_ms, 0.45, text, color="white", ha="center", va="center", fontsize=7, clip_on=True)


def _shade(rows: int) -> int:
    return bisect_left(_ROW_STEPS, rows)


def _dress(axis: Any, timeline: Timeline, lane: TimelineTarget, length_ms: float) -> None:
    figures = time_shares(timeline, lane)
    facts = f"target busy {figures.busy:.0%}, waits {figures.waiting:.0%}, draft busy {figures.draft_busy:.0%}"
    rate = f"hits {figures.hit_rate:.0%}, {figures.emitted_per_round:.2f} tokens a round"
    axis.set_title(f"{lane.label}  ({facts}, {rate})", loc="left", fontsize=9)
    axis.set_xlim(0, length_ms)
    axis.set_ylim(-0.05, 2.15)
    axis.set_yticks([0.45, 1.65], ["target", "draft"])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(axis: Any, title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Patch(color=_TARGET, label="target: accepted/submitted"),
        Patch(color=_WAIT, label="target waits"),
        *(Patch(color=color, label=f"draft, {label}") for color, label in zip(_ROWS, _ROW_LABELS, strict=True)),
        Patch(color=_DRAFT_PREFILL, label="draft prefills"),
        Line2D([], [], marker="|", ms=9, mew=2.6, color=_HIT, ls="", label="hit"),
        Line2D([], [], marker="|", ms=9, mew=2.6, color=_MISS, ls="", label="miss"),
    ]
    figure = axis.figure
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.legend(handles=entries, ncols=len(entries), loc="outside lower center", frameon=False, fontsize=7.5,
                  handlelength=1.2, columnspacing=1.1)  # fmt: skip
