"""Figures of a report: speed by task and method, speed against concurrency, hit rate against rows. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from specbranch.bench.results import Results
from specbranch.bench.scenario import BARE, BenchMethod
from specbranch.bench.summary import Line, Ratio, mean_speeds, summarize
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
_LEAST_HITS = 0.05


def draw_figures(results: Results, directory: Path, stem: str) -> list[tuple[str, Path]]:
    """Write all figures that these results give as SVG and PNG; each with its caption and the path of the SVG."""
    pyplot = load_pyplot()
    drawn = []
    for name, draw in _drawers(results).items():
        if draw is None:
            continue
        figure, axis = pyplot.subplots(figsize=(10, 3.8), layout="constrained")
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
        path = directory / f"{stem}-{name}.svg"
        # No date and no random names: the same results give the same file.
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
    return {
        "speed": _speed_drawer(results, lines),
        "load": _load_drawer(results),
        "hits": _hits_drawer(results, lines),
    }


def _speed_drawer(results: Results, lines: Sequence[Line]) -> _Drawer | None:
    """Bars in groups: one group a task, and the mean of all tasks where there are several."""
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
    """The middle of the time per token, each run a point."""

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
    # A method that takes turns prepares nothing, and its hits mean nothing.
    points = [line for line in lines if (line.hit_rate or 0) > _LEAST_HITS and line.rows_per_round]
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
    """A color of its own for every method; the first method with a planner has that planner's usual color."""
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
    """The low and the high ends of ranges; NaN, for which nothing is drawn, where there is no range."""
    return np.array([[ratio.low for ratio in ratios], [ratio.high for ratio in ratios]], dtype=float)


def _label(results: Results, name: str) -> str:
    cores = results.scenario.num_cores(results.method(name))
    return f"{name} ({cores} core{'s' if cores > 1 else ''})"
