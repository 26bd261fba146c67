"""Drawing a profile: step time against rows, the fitted line, and the bound of memory bandwidth. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbranch.bench.profile import Profile
from specbranch.errors import SpecBranchError
from specbranch.extensions import load_pyplot

_STEP, _LINE, _BOUND = "#264653", "#2a9d8f", "#d1495b"


class PlotError(SpecBranchError, ValueError):
    """A file that no figure can be drawn to."""


def check_plot(path: Path) -> None:
    """Raise now what `plot_profile` would raise after a long measurement."""
    formats = load_pyplot().Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise PlotError(f"cannot draw to {path}: end its name in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise PlotError(f"cannot draw to {path}: there is no directory {path.parent}")


def plot_profile(path: Path, profile: Profile) -> None:
    """Draw to a file; its suffix gives the format."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    _draw_steps(axis, profile)
    _draw_line(axis, profile)
    _draw_bound(axis, profile)
    _dress(axis, profile)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw_steps(axis: Any, profile: Profile) -> None:
    spreads = profile.timings.by_rows
    medians = [1e3 * spread.median_s for spread in spreads.values()]
    below = [1e3 * (spread.median_s - spread.p10_s) for spread in spreads.values()]
    above = [1e3 * (spread.p90_s - spread.median_s) for spread in spreads.values()]
    axis.errorbar(
        list(spreads), medians, yerr=(below, above), fmt="o", color=_STEP, ms=6, capsize=4, lw=1.4, zorder=3,
        label="median step, bars from p10 to p90",
    )  # fmt: skip


def _draw_line(axis: Any, profile: Profile) -> None:
    cost = profile.fit.cost
    ends = [1, max(profile.timings.by_rows)]
    label = f"fit: {1e3 * cost.first_s:.4g} ms {1e3 * cost.more_s:+.4g} ms for each further row"
    axis.plot(ends, [1e3 * cost.at(rows) for rows in ends], color=_LINE, lw=2, zorder=2, label=label)


def _draw_bound(axis: Any, profile: Profile) -> None:
    if profile.bound_s is None or profile.bandwidth is None or profile.weight_bytes is None:
        return
    size, speed = f"{profile.weight_bytes / 1e6:.0f} MB", f"{profile.bandwidth / 1e9:.1f} GB/s"
    label = f"bound: {size} of weights at {speed} = {1e3 * profile.bound_s:.3g} ms"
    axis.axhline(1e3 * profile.bound_s, color=_BOUND, ls="--", lw=1.4, zorder=1, label=label)


def _dress(axis: Any, profile: Profile) -> None:
    info, timings = profile.info, profile.timings
    title = f"{info.model}: {profile.engine} on {info.device}, threads {profile.threads}, context {timings.context_len}"
    axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axis.set_xlabel("rows in one step")
    axis.set_ylabel("step time, ms")
    axis.set_xticks(list(timings.by_rows))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
