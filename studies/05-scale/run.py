#!/usr/bin/env python3
"""Where branch parallelism pays: speed over plain decoding, in all and for each device, by the simulator.

Maps over c (target step over draft step), acceptance, requests at once and targets that share one draft device; and SSD's
published point as a check. Assumed: a further draft row costs 3 % of a step, and a target's step doubles at 256 tokens.
Writes result.json, published.json and figure.png; needs matplotlib, no engine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from specbranch.extensions import load_pyplot
from specbranch.machine import provenance
from specbranch.simulation.presets import ROW_COST, ModelPair, make_trace
from specbranch.simulation.simulate import Layout, Method, method_for, simulate

HERE = Path(__file__).parent
RATIOS = (3, 5, 8, 12, 20, 30)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# (requests at once, targets that share a draft device)
SETTINGS = ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (1, 16))
PLANNERS = ("sps", "pearl", "specbranch", "budget")
SSD = {"sps": 2.96, "ssd": 4.68}  # published: 161.8 and 255.8 tokens a second over 54.7, Llama 70B on 4 devices + 1B
SSD_SETTINGS = {"gamma": 7, "num_guesses": 24}  # three guesses at each of eight stop points
SSD_RATIOS = (6.0, 10.0, 15.0)  # c is not published
RIDGE = 256  # tokens at which a target's step takes twice the time of one token's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "result.json", help="of the map")
    parser.add_argument("--published", type=Path, default=HERE / "published.json", help="of SSD's published point")
    parser.add_argument("--plot", type=Path, default=HERE / "figure.png")
    parser.add_argument("--published-only", action="store_true", help="the published point anew, the map as it was")
    parser.add_argument("--draw", action="store_true", help="draw the figure from the result and simulate nothing")
    args = parser.parse_args()
    source = {"provenance": provenance()}  # now: the first file that is written changes the checkout
    if not args.draw:
        _write(args.published, {"published_ssd": _published_ssd(), **source})
    if not args.draw and not args.published_only:
        cells = [(c, a, batch, sharing) for batch, sharing in SETTINGS for c in RATIOS for a in ACCEPTANCES]
        with ProcessPoolExecutor() as pool:
            rows = [row for found in pool.map(_cell, *zip(*cells, strict=True)) for row in found]
        _write(args.out, {"rows": rows, **source})
    _draw(json.loads(args.out.read_text())["rows"], args.plot)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _cell(c: float, acceptance: float, batch: int, sharing: float) -> list[dict[str, Any]]:
    layout = Layout(c, ROW_COST, batch, c / RIDGE, sharing)
    num_answers, answer_len = max(8, batch), 80 if batch < 64 else 40
    rows = []
    for planner in PLANNERS:
        tries = []
        # A window as long as the target's step takes, and half of it.
        for gamma in sorted({max(2, round(min(c, 16) * share)) for share in (0.5, 1.0)}):
            pair = ModelPair("map", c, gamma, acceptance, "", row_cost=ROW_COST)
            trace = make_trace(pair, num_answers, answer_len, random.Random(1))
            method = method_for(planner, pair, as_in_paper=False)
            outcome = simulate(trace, method, layout)
            tries.append({"gamma": gamma, "speed": outcome.speedup, "rows_per_round": outcome.stats.rows_per_round})
        best = max(tries, key=lambda one: one["speed"])
        rows.append(
            {
                "c": c,
                "acceptance": acceptance,
                "batch": batch,
                "sharing": sharing,
                "planner": planner,
                **best,
                "per_device": best["speed"] / layout.devices,
            }
        )
    print(f"c {c:g} acceptance {acceptance:g} batch {batch} sharing {sharing:g}", file=sys.stderr)
    return rows


def _published_ssd() -> list[dict[str, Any]]:
    """SSD's own pair: acceptance from its figure for plain speculation, at several c, so only SSD's speed is a forecast."""
    found = []
    for c in SSD_RATIOS:
        low, high = 0.5, 0.99
        for _ in range(8):
            acceptance = (low + high) / 2
            is_fast = _speed("sps", c, acceptance) > SSD["sps"]
            low, high = (low, acceptance) if is_fast else (acceptance, high)
        simulated = {planner: _speed(planner, c, acceptance) for planner in ("sps", "ssd", "specbranch", "budget")}
        found.append({"c": c, "acceptance": acceptance, "published": SSD, **simulated})
        print(f"ssd's pair at c {c:g}: {simulated}", file=sys.stderr)
    return found


def _speed(planner: str, c: float, acceptance: float) -> float:
    gamma = SSD_SETTINGS["gamma"]
    trace = make_trace(ModelPair("ssd", c, gamma, acceptance, "", row_cost=ROW_COST), 16, 250, random.Random(1))
    settings = SSD_SETTINGS if planner == "ssd" else {"gamma": gamma}
    return simulate(trace, Method(planner, settings), Layout(c, ROW_COST)).speedup


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, len(SETTINGS), figsize=(17, 6.2), layout="constrained", sharex=True, sharey=True)
    for column, (batch, sharing) in enumerate(SETTINGS):
        for line, (measure, title) in enumerate((("speed", "speed"), ("per_device", "speed for each device"))):
            axis = axes[line, column]
            values = [
                [_best(rows, c, acceptance, batch, sharing)[measure] for c in RATIOS] for acceptance in ACCEPTANCES
            ]
            axis.imshow(values, origin="lower", cmap="RdYlGn", vmin=0.2, vmax=1.8, aspect="auto")
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    colour = "white" if value > 1.5 else "black"
                    axis.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
            axis.set_xticks(range(len(RATIOS)), RATIOS)
            axis.set_yticks(range(len(ACCEPTANCES)), ACCEPTANCES)
            shared = "own draft device" if sharing == 1 else f"draft shared by {sharing:g}"
            if line == 0:
                axis.set_title(f"{batch} at once, {shared}", fontsize=10)
            if column == 0:
                axis.set_ylabel(f"{title}\nacceptance")
            if line == 1:
                axis.set_xlabel("c")
    figure.suptitle(
        "The best of sps, pearl, specbranch and budget over plain decoding (simulated): red below 1", x=0.01, ha="left"
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _best(rows: list[dict[str, Any]], c: float, acceptance: float, batch: int, sharing: float) -> dict[str, Any]:
    wanted = (c, acceptance, batch, sharing)
    own = [row for row in rows if (row["c"], row["acceptance"], row["batch"], row["sharing"]) == wanted]
    return max(own, key=lambda row: row["speed"])


if __name__ == "__main__":
    main()
