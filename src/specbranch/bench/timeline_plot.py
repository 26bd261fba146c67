"""Drawing a timeline: one panel for each target with its steps and waits, and the draft's steps. Needs matplotlib."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

from specbranch.bench.timeline_file import Span, TargetLane, Timeline, shares
from specbranch.extensions import load_pyplot

_TARGET, _WAIT, _PREFILL = "#264653", "#d1495b", "#d9d9d9"
_HIT, _MISS = "#2a9d8f", "#d1495b"
_DRAFT_PREFILL = "#c9b79c"
_ROWS = ("#bfe3dd", "#7fcabd", "#2a9d8f", "#1b6f65")  # for 1 row, 2, 3 or 4, more
_ROW_STEPS = (1, 2, 4)
_ROW_LABELS = ("1 row", "2 rows", "3-4 rows", "5 rows or more")
_MAX_PANELS = 6
_LABEL_SHARE = 0.022  # a bar at least this wide, as a share of the figure, has room for numbers


def plot_timeline(path: Path, timeline: Timeline, stretches: list[tuple[float, float]], title: str) -> None:
    """Draw the first targets, each over its own time range; the file's suffix gives the format."""
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
    """For every target a time range of equal length, from its middle; the slowest has about `num_rounds` steps in it.

    A target with fewer steps shows all that it has.
    """
    length_s = max(_typical_s(lane) for lane in timeline.targets) * num_rounds
    return [_middle(lane, length_s) for lane in timeline.targets]


def _typical_s(lane: TargetLane) -> float:
    """The mean time of a round, its wait included."""
    rounds = lane.rounds
    time_s = sum(span.end_s - span.start_s for span in rounds + lane.waits)
    return time_s / len(rounds) if rounds else time_s


def _middle(lane: TargetLane, length_s: float) -> tuple[float, float]:
    spans = sorted(lane.rounds + lane.waits, key=lambda span: span.start_s)
    first_s, last_s = spans[0].start_s, spans[-1].end_s
    earliest_s = max(first_s, (first_s + last_s - length_s) / 2)
    start_s = next((step.start_s for step in lane.rounds if step.start_s >= earliest_s), first_s)
    return start_s, start_s + length_s


def _draw_panel(axis: Any, timeline: Timeline, lane: TargetLane, stretch: tuple[float, float]) -> None:
    start_s, end_s = stretch
    shown = timeline.between(start_s, end_s)
    here = next((one for one in shown.targets if one.name == lane.name), TargetLane(lane.name))
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


def _box(span: Span, origin_s: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    x, width = 1e3 * (span.start_s - origin_s), 1e3 * (span.end_s - span.start_s)
    return Rectangle((x, y), width, 0.9, facecolor=color, edgecolor="white", linewidth=0.5)


def _label_step(axis: Any, step: Span, origin_s: float, length_s: float) -> None:
    if step.is_prefill or step.end_s - step.start_s < _LABEL_SHARE * length_s:
        return
    middle_ms = 1e3 * ((step.start_s + step.end_s) / 2 - origin_s)
    text = f"{step.args['accepted']}/{step.args['submitted']}"
    axis.text(middle_ms, 0.45, text, color="white", ha="center", va="center", fontsize=7, clip_on=True)


def _shade(rows: int) -> int:
    return bisect_left(_ROW_STEPS, rows)


def _dress(axis: Any, timeline: Timeline, lane: TargetLane, length_ms: float) -> None:
    figures = shares(timeline, lane)
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
