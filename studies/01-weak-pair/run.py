#!/usr/bin/env python3
"""Does specbranch beat pearl on a weakly aligned pair, and at what price in rolled-back tokens?

Writes result.json beside this file and draws figure.png from that file alone; `--draw` only draws. Needs the `bench`
extra.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specbranch.extensions import load_pyplot
from specbranch.machine import provenance
from specbranch.simulation.presets import PAIRS, ModelPair, make_trace
from specbranch.simulation.simulate import Layout, Method, method_for, simulate
from specbranch.trace import Trace, read_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT = HERE / "result.json"
SEEDS = range(5)
TOKENS = 4000
SWEEP_SEEDS = 2  # of those: for the sweep over all pairs, in both forms
PREDICTORS = ("confidence", "oracle", "random")
CONFIDENCES = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CHAT = "traces/qwen-coder-chat.jsonl.gz"


def figures(traces: list[Trace], method: Method, layout: Layout) -> dict[str, Any]:
    """Means over seeds, with the standard deviation of the speed between seeds."""
    rows = [simulate(trace, method, layout).as_json() for trace in traces]
    lost = {
        cause: statistics.mean(row["rolled_back"][cause] for row in rows) for cause in ("rejected", "unused", "cut")
    }
    speeds = [row["speedup"] for row in rows]
    return {
        "speedup": statistics.mean(speeds),
        "speedup_sd": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "rolled_back": lost,
        "losing": statistics.mean(row["losing"] for row in rows),
        **rollback_rates(rows),
        "used": statistics.mean(row["used"] for row in rows),
        **{name: statistics.mean(row[name] for row in rows) for name in ("hit_rate", "wait_share", "rows_per_round")},
    }


def rollback_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rolled-back tokens over all drafted ones, as papers count them: without losing branches; and with them."""
    rates: dict[str, list[float]] = {"rollback_rate": [], "rollback_rate_with_losing": []}
    for row in rows:
        lost = sum(row["rolled_back"].values())
        rates["rollback_rate"].append((lost - row["losing"]) / (lost - row["losing"] + row["used"]))
        rates["rollback_rate_with_losing"].append(lost / (lost + row["used"]))
    return {name: statistics.mean(values) for name, values in rates.items()}


def traces_of(pair: ModelPair) -> list[Trace]:
    return [make_trace(pair, TOKENS // 250, 250, random.Random(seed)) for seed in SEEDS]


def methods(pair: ModelPair) -> dict[str, Method]:
    branch = method_for("specbranch", pair)
    named = {name: method_for(name, pair) for name in ("sps", "adaedl", "pearl", "ssd")}
    named |= {f"specbranch, {predictor}": replace(branch, predictor=predictor) for predictor in PREDICTORS}
    named["specbranch, one branch"] = with_settings(branch, max_branches=1)
    named["specbranch, 12 branches"] = with_settings(branch, max_branches=12)
    named["specbranch, confidence 0.3"] = with_settings(branch, confidence=0.3)
    named["specbranch, as served"] = method_for("specbranch", pair, as_in_paper=False)
    return named


def with_settings(method: Method, **settings: Any) -> Method:
    return replace(method, settings={**method.settings, **settings})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the figure from result.json and simulate nothing")
    if not parser.parse_args().draw:
        measure()
    document = json.loads(RESULT.read_text())
    draw(document["pairs"]["vicuna-68m-13b"]["methods"], document["confidence_sweep"])


def measure() -> None:
    weak = PAIRS["vicuna-68m-13b"]
    cases: dict[str, tuple[ModelPair, list[Trace]]] = {name: (pair, traces_of(pair)) for name, pair in PAIRS.items()}
    recorded = read_trace(ROOT / CHAT)
    cases["recorded chat, c 8"] = (replace(weak, name="chat", acceptance=recorded.match_share()), [recorded])

    table: dict[str, Any] = {}
    with Progress(transient=True) as bar:
        task = bar.add_task("simulating", total=len(cases) * len(methods(weak)) + len(PAIRS) + 2 * len(CONFIDENCES))
        for name, (pair, traces) in cases.items():
            table[name] = {"c": pair.c, "gamma": pair.gamma, "acceptance": pair.acceptance, "methods": {}}
            for label, method in methods(pair).items():
                table[name]["methods"][label] = figures(traces, method, Layout(pair.c, pair.row_cost))
                bar.advance(task)
        by_pair = {}
        for name, pair in PAIRS.items():
            by_pair[name] = over_pearl(pair, cases[name][1][:SWEEP_SEEDS])
            bar.advance(task)
        sweep: dict[str, Any] = {"confidence": {}, "oracle": {}}
        for predictor, found in sweep.items():
            for confidence in CONFIDENCES:
                method = with_settings(method_for("specbranch", weak, predictor), confidence=confidence)
                found[confidence] = figures(cases[weak.name][1], method, Layout(weak.c, weak.row_cost))
                bar.advance(task)

    document = {
        "seeds": len(SEEDS),
        "tokens": TOKENS,
        "pairs": table,
        "confidence_sweep": sweep,
        "confidence_by_pair": {"seeds": SWEEP_SEEDS, "speed_over_pearl": by_pair},
        "provenance": provenance(),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")


def over_pearl(pair: ModelPair, traces: list[Trace]) -> dict[str, dict[float, float]]:
    """Speed over pearl's by the confidence under which a distribution is doubtful, in the paper's form and as served."""
    layout = Layout(pair.c, pair.row_cost)

    def elapsed_s(method: Method) -> float:
        return sum(simulate(trace, method, layout).elapsed_s for trace in traces)

    pearl_s = elapsed_s(method_for("pearl", pair))
    return {
        form: {
            confidence: pearl_s
            / elapsed_s(
                with_settings(method_for("specbranch", pair, as_in_paper=form == "paper"), confidence=confidence)
            )
            for confidence in CONFIDENCES[1:7]
        }
        for form in ("paper", "served")
    }


def draw(weak: dict[str, Any], sweep: dict[str, Any]) -> None:
    figure, (bars, curves) = load_pyplot().subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    _draw_rolled_back(bars, weak)
    _draw_sweep(curves, weak["pearl"], sweep)
    figure.savefig(HERE / "figure.png", dpi=130)


def _draw_rolled_back(bars: Any, weak: dict[str, Any]) -> None:
    # ssd's losing branches would fill the page; as served, tokens that are cut may be on losing branches too.
    shown = [name for name in weak if name not in ("ssd", "specbranch, as served")]
    bottom = [0.0] * len(shown)
    parts = {
        "rejected: submitted and refused": ([weak[n]["rolled_back"]["rejected"] for n in shown], "#d1495b"),
        "cut: drafted, then not submitted": ([weak[n]["rolled_back"]["cut"] for n in shown], "#f4a261"),
        "unused, on the draft's first choice": (
            [
                sum(weak[n]["rolled_back"].values())
                - weak[n]["rolled_back"]["rejected"]
                - weak[n]["rolled_back"]["cut"]
                - weak[n]["losing"]
                for n in shown
            ],
            "#e9c9b1",
        ),
        "on losing branches": ([weak[n]["losing"] for n in shown], "#cfd8dc"),
    }
    for label, (values, color) in parts.items():
        bars.barh(shown, values, left=bottom, color=color, label=label)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    for index, name in enumerate(shown):
        bars.text(bottom[index] + 0.15, index, f"{weak[name]['speedup']:.2f}x", va="center", fontweight="bold")
    bars.invert_yaxis()
    bars.set_xlabel("rolled-back tokens per emitted token; speed beside the bar")
    bars.set_title("vicuna-68m-13b: what is rolled back, by cause", loc="left", fontweight="bold")
    bars.legend(frameon=False, fontsize=8)
    bars.set_xlim(0, max(bottom) * 1.15)


def _draw_sweep(curves: Any, pearl: dict[str, Any], sweep: dict[str, Any]) -> None:
    for predictor, color in (("confidence", "#1982c4"), ("oracle", "#2a9d8f")):
        xs = [float(confidence) for confidence in sweep[predictor]]
        curves.plot(
            xs,
            [row["speedup"] for row in sweep[predictor].values()],
            "-o",
            color=color,
            label=f"specbranch in the paper's form, {predictor}",
        )
        curves.plot(
            xs,
            [row["rolled_back"]["rejected"] for row in sweep[predictor].values()],
            ":s",
            color=color,
            ms=4,
            label=f"its rejected tokens, {predictor}",
        )
    curves.axhline(pearl["speedup"], color="#264653", ls="--", lw=1, label="pearl")
    curves.axhline(pearl["rolled_back"]["rejected"], color="#264653", ls=":", lw=1, label="pearl's rejected tokens")
    curves.set_xlabel("confidence under which a distribution is doubtful")
    curves.set_title("Speed; rejected tokens per emitted token (dotted)", loc="left", fontweight="bold")
    curves.grid(alpha=0.25)
    curves.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.26))


if __name__ == "__main__":
    main()
