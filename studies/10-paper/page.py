#!/usr/bin/env python3
"""Write docs/dev/paper.md and its pictures from result.json and from the result files of the benchmarks.

studies/10-paper/page.py            # after run.py, which calls it
studies/10-paper/page.py --check    # fail if the page is not as it would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specbranch.bench.results import mean_speeds, read_results
from specbranch.extensions import load_pyplot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "dev" / "paper.md"
PAIRS = ("llama-68m-7b", "vicuna-68m-13b", "deepseek-1.3b-33b", "llama3-8b-70b")
WEAK = "vicuna-68m-13b"
TOLERANCE = 5  # points of percent within which a gain counts as repeated
COLORS = {
    "pearl": "#8d99ae",
    "specbranch, confidence": "#1982c4",
    "specbranch, oracle": "#2a9d8f",
    "specbranch, served": "#6a4c93",
    "budget": "#d1495b",
    "sps": "#c9ada7",
    "adaedl": "#f4a261",
}


class Result:
    """The result file, with its rows found by section and key."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def row(self, section: str, *key: Any) -> dict[str, Any]:
        (found,) = [row for row in self.document[section] if row["key"] == list(key)]
        return found

    def speed(self, section: str, *key: Any) -> float:
        return float(self.row(section, *key)["speed"])

    def gain(self, pair: str, label: str, correlation: float = 0.0) -> float:
        """Return by how many percent a method is faster than PEARL on the average of a pair."""
        own, pearl = (self.speed("pairs", pair, correlation, name) for name in (label, "pearl"))
        return 100 * (own / pearl - 1)

    def published_gain(self, pair: str) -> float:
        pearl, own = self.document["published"]["averages"][pair]
        return 100 * (own / pearl - 1)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(value: float) -> str:
    return f"{value:+.0f} %".replace("-", "−")


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def real(file: str, method: str) -> str:
    """Return a method's speed over bare vLLM on real engines, with its range."""
    speed = mean_speeds(read_results(ROOT / "benchmarks" / file))[1][method]
    return f"{speed.value:.2f} ({speed.range})" if speed.low is not None else f"{speed.value:.2f}"


def real_rollback(file: str, method: str) -> float:
    """Return the share of drafted tokens that were rolled back on real engines, losing branches included."""
    lost = used = 0.0
    for record in read_results(ROOT / "benchmarks" / file).records:
        if record["method"] == method and record["draft"]:
            draft = record["draft"]
            lost += draft["rejected"] + draft["unused"] + draft["cut"]
            used += draft["accepted"] + draft["hits"]  # after a hit the target's own token had been drafted too
    return lost / (lost + used)


def is_budget_ahead(result: Result) -> bool:
    others = ("specbranch, confidence", "specbranch, oracle", "specbranch, served")
    return all(
        result.gain(pair, "budget") > max(0.0, *(result.gain(pair, label) for label in others)) for pair in PAIRS
    )


def beats_pearl(result: Result) -> str:
    labels = ("specbranch, confidence", "specbranch, oracle", "specbranch, served", "budget")
    rows, correlated = [], max(row["key"][1] for row in result.document["pairs"])
    for pair in PAIRS:
        published = result.document["published"]["averages"][pair]
        rows.append(
            [
                pair,
                f"{published[0]:.2f}",
                f"{result.speed('pairs', pair, 0.0, 'pearl'):.2f}",
                f"{published[1]:.2f}",
                percent(result.published_gain(pair)),
                *(percent(result.gain(pair, label)) for label in labels),
                percent(result.gain(pair, "specbranch, oracle", correlated)),
            ]
        )
    near = [pair for pair in PAIRS if abs(result.gain(pair, labels[0]) - result.published_gain(pair)) <= TOLERANCE]
    near_oracle = [
        pair for pair in PAIRS if abs(result.gain(pair, labels[1]) - result.published_gain(pair)) <= TOLERANCE
    ]
    ahead = is_budget_ahead(result)
    least = min(PAIRS, key=lambda pair: result.gain(pair, labels[0]))
    heads = (
        "pair", "PEARL, published", "simulated", "SpecBranch, published", "over PEARL, published", "simulated, confidence alone",
        "with an oracle for H-RAD", "as served", "`budget`", f"oracle, correlation {correlated:g}",
    )  # fmt: skip
    chosen = result.document["chosen"]
    return f"""## Is it faster than PEARL?

**In simulation yes, on every pair by less than published: within {TOLERANCE} points of the published gain on {len(near)} of 4 pairs with the
draft's confidence alone, on {len(near_oracle)} of 4 with an oracle in H-RAD's place. `budget` is {"" if ahead else "not "}ahead of both on all four.**

{table(heads, rows)}

Acceptance is solved from PEARL's published speed by the exact chain of its two states, so PEARL's column is no forecast and all
others are. `specbranch` is in the paper's form, with threshold {chosen["confidence"]:g} and at most {chosen["max_branches"]} branches. These two
were chosen before, on four recorded traces of another pair (Qwen2.5-Coder, `traces/`), among six thresholds and two numbers of
branches. A made trace has a calibrated draft: where its confidence is u, the target agrees with probability u, so a
predictor can tell nothing that the confidence does not tell once the draft has run. The last column has confidences that are alike at
neighbouring positions, as recorded ones are (0.18 to 0.48).

Why less on well aligned pairs: a method can gain only what a miss costs, and PEARL already has {result.speed("pairs", least, 0.0, "pearl"):.2f} of the
{result.document["pairs_at"][least]["c"]:g} that c allows on {least}. There even an oracle gains {percent(result.gain(least, labels[1]))}.

On real engines, over bare vLLM: the flagship pair in bfloat16, `specbranch` {real("planners.jsonl", "specbranch")} and `pearl`
{real("planners.jsonl", "pearl")}, `budget` {real("planners.jsonl", "budget")}; a weak pair, `specbranch` {real("weak.jsonl", "specbranch")} and `pearl`
{real("weak.jsonl", "pearl")}, `budget` {real("weak.jsonl", "budget")} ([benchmarks](benchmarks.md#every-planner-four-tasks), two cores).

![Speed over plain decoding of the four pairs](../../studies/10-paper/pairs.png)"""


def main_table(result: Result) -> str:
    rows = []
    for pair in PAIRS:
        for task, (pearl, own) in result.document["published"]["cells"][pair].items():
            speeds = [
                result.speed("cells", pair, task, label)
                for label in ("pearl", "specbranch, confidence", "specbranch, oracle", "budget")
            ]
            rows.append([pair, task, f"{pearl:.2f}", f"{own:.2f}", *(f"{speed:.2f}" for speed in speeds)])
    heads = (
        "pair", "task", "PEARL, published", "SpecBranch, published", "PEARL, simulated", "SpecBranch, confidence alone",
        "with an oracle", "`budget`",
    )  # fmt: skip
    ratios = [
        result.speed("cells", pair, task, "specbranch, confidence") / own
        for pair in PAIRS
        for task, (_, own) in result.document["published"]["cells"][pair].items()
    ]
    return f"""## The main table

Each cell has the acceptance at which PEARL has its published speed there. SpecBranch with confidence alone has {min(ratios):.2f} to
{max(ratios):.2f} of its published speed.

{table(heads, rows)}"""


def rollback(result: Result) -> str:
    labels = (
        "sps",
        "adaedl",
        "pearl",
        "specbranch, confidence",
        "specbranch, oracle",
        "specbranch, served",
        "budget",
        "budget, min_accept_prob 0.4",
    )
    published = {"sps": "76.6 %", "pearl": "90.3 %", "specbranch, oracle": "39.6 %"}
    on_weak = {
        "pearl": "pearl",
        "specbranch, confidence": "specbranch, paper",
        "specbranch, served": "specbranch",
        "budget": "budget",
    }
    rows = []
    for label in labels:
        row = result.row("pairs", WEAK, 0.0, label)
        rows.append(
            [
                label,
                published.get(label, ""),
                share(row["rollback_rate"]),
                share(row["rollback_rate_with_losing"]),
                share(row["refused_share"]),
                f"{row['rejected']:.2f}",
                f"{row['run_length']:.1f}",
                share(real_rollback("weak.jsonl", on_weak[label])) if label in on_weak else "",
            ]
        )
    heads = (
        "method", "rolled back, published", "simulated", "with losing branches", "refused of the submitted", "refused per emitted token",
        "run length M", "real weak pair, with losing branches",
    )  # fmt: skip
    oracle, pearl = (result.row("pairs", WEAK, 0.0, label) for label in ("specbranch, oracle", "pearl"))
    return f"""## How much is rolled back?

**The published 39.6 % is not repeated: SpecBranch's rate is {share(oracle["rollback_rate"])} here, and PEARL's {share(pearl["rollback_rate"])}. What falls by more
than half is what the target refuses: {oracle["rejected"]:.2f} tokens per emitted token against {pearl["rejected"]:.2f}.**

{WEAK}, by the paper's definition: rolled-back tokens over all drafted tokens. It is not known whether the paper counts losing
branches, nor whether its own method's rate counts only what was submitted; the refused share of the submitted tokens is the
ratio that comes nearest. M is how many tokens are emitted from one miss to the next, without the correction.

{table(heads, rows)}"""


def ablation(result: Result) -> str:
    labels = ("full", "without branches", "without H-RAD, confidence", "without H-RAD, fixed length")
    rows = [
        [
            pair,
            *(f"{result.speed('ablation', pair, label):.2f}" for label in labels),
            f"{result.speed('pairs', pair, 0.0, 'pearl'):.2f}",
        ]
        for pair in PAIRS
    ]
    weak = {label: result.speed("ablation", WEAK, label) for label in labels}
    strong = {label: result.speed("ablation", "llama3-8b-70b", label) for label in labels}
    return f"""## Ablations

The paper has 1.95 against 1.72 without H-RAD on the weak pair (by its GSM8K value), and says that branches matter more on well aligned
pairs and H-RAD more on weak ones. Here an oracle stands for H-RAD. Without branches the speed of the weak pair changes by
{percent(100 * (weak["without branches"] / weak["full"] - 1))}, that of the well aligned one by {percent(100 * (strong["without branches"] / strong["full"] - 1))};
with confidence in H-RAD's place by {percent(100 * (weak[labels[2]] / weak["full"] - 1))} and {percent(100 * (strong[labels[2]] / strong["full"] - 1))}, with
a fixed length by {percent(100 * (weak[labels[3]] / weak["full"] - 1))} and {percent(100 * (strong[labels[3]] / strong["full"] - 1))}.

{table(("pair", *labels, "PEARL"), rows)}"""


def lengths(result: Result) -> str:
    rows = []
    for row in result.document["lengths"]:
        window = len(row["measured"]) - 1
        rows.append(
            [
                row["trace"],
                f"{row['acceptance']:.3f}",
                *(f"{row[kind][length]:.2f}" for length in (0, window) for kind in ("measured", "geometric")),
            ]
        )
    heads = ("trace", "acceptance", "none of 8, measured", "geometric", "all 8, measured", "geometric")
    return f"""## Accepted lengths

The paper shows truncated geometric lengths (acceptance independent at each position). On recorded answers of a real pair (Qwen2.5-Coder, 1.5B with its
0.5B) the ends are heavier: whole windows are accepted more often than independence allows.

{table(heads, rows)}"""


def theorem(result: Result) -> str:
    rows = []
    for pair in (WEAK, "llama3-8b-70b"):
        at = result.document["pairs_at"][pair]
        for gamma in (2, 4, int(at["gamma"]), 12):
            row = result.row("theorem", pair, gamma)
            rows.append([pair, str(gamma), *(f"{row[name]:.2f}" for name in ("theorem", "chain", "speed"))])
    weak = result.row("theorem", WEAK, 8)
    return f"""## Theorem 1

**The theorem leaves out the target's own token, so it is no model of speed: {weak["theorem"]:.3f} times plain decoding for {WEAK}, where PEARL is published
at 1.77 and its exact chain gives {weak["chain"]:.2f}.** Its shape holds: speed rises up to γ = c and is flat around it.

{table(("pair", "γ", "Theorem 1", "exact chain", "simulated"), rows)}

For γ above c our `pearl` never waits, unlike the lock step that the chain describes, so it is faster there."""


def sweeps(result: Result) -> str:
    epsilon = {
        predictor: {
            row["key"][2]: row["speed"] for row in result.document["epsilon"] if row["key"][:2] == [WEAK, predictor]
        }
        for predictor in ("confidence", "oracle")
    }
    falls = {
        predictor: 100 * (found[0.9] / max(speed for value, speed in found.items() if value >= 0.1) - 1)
        for predictor, found in epsilon.items()
    }
    rows = [
        [
            str(count),
            *(
                f"{result.speed('branches', pair, predictor, count):.2f}"
                for pair in (WEAK, "llama3-8b-70b")
                for predictor in ("confidence", "oracle")
            ),
            f"{result.row('branches', WEAK, 'confidence', count)['cells']:.0f}",
        ]
        for count in (1, 2, 4, 6, 8, 12, 16)
    ]
    return f"""## Threshold, branches, γ, c, acceptance

![Speed by threshold, branches, gamma, c and acceptance](../../studies/10-paper/sweeps.png)

- **Threshold ε.** The paper reports 72 to 67 tokens/s with H-RAD and 64 to 49 without, from 0.1 upward. Here speed falls from its best to
  ε = 0.9 by {abs(falls["confidence"]):.0f} % with confidence alone and {abs(falls["oracle"]):.0f} % with an oracle: little sensitivity is not seen.
- **Branches and memory.** Cells of the draft's cache for tokens that are not committed, at most, on the weak pair; no cell is copied for a branch. A cell
  takes the draft's KV bytes of one token.

{table(("k_max", f"{WEAK}, confidence", "oracle", "llama3-8b-70b, confidence", "oracle", "cells"), rows)}"""


def energy(result: Result) -> str:
    powers = list(result.document["pairs"][0]["energy"])
    rows = []
    for label in (
        "sps",
        "pearl",
        "specbranch, confidence",
        "specbranch, oracle",
        "budget",
        "budget, min_accept_prob 0.4",
    ):
        row = result.row("pairs", WEAK, 0.0, label)
        rows.append([label, f"{row['speed']:.2f}", *(f"{row['energy'][power]:.2f}" for power in powers)])
    return f"""## Energy

The paper alludes to energy, and no figure of it reached us. A model from busy times: the target draws 1 while it computes, the draft's device a
share of that while it computes, and an idle device draws nothing. Energy of a token over that of plain decoding, {WEAK}:

{table(("method", "speed", *(f"draft draws {power}" for power in powers)), rows)}"""


def batches(result: Result) -> str:
    sizes = sorted({row["key"][1] for row in result.document["batch"]})
    rows = [
        [label, *(f"{result.speed('batch', label, size):.2f}" for size in sizes)]
        for label in ("pearl", "specbranch, confidence", "budget")
    ]
    return f"""## Several requests, and temperature

The paper measures one request at a time. Simulated on {WEAK}, a target step that takes twice as long at 256 tokens as at one (an assumption):

{table(("method", *(f"{size} at once" if size > 1 else "one request" for size in sizes)), rows)}

On real engines: [one to sixteen requests](benchmarks.md#one-to-sixteen-requests-at-once-without-amx), [temperature 1](benchmarks.md#sampled-text-at-temperature-1-without-amx).
The published code tests top-k tokens by p/q, which is biased above temperature 0; here tokens are matched, or drawn
([exactness](../exactness.md)), and every planner is enumerated in rational numbers."""


HEAD = """# The paper, and what anyone can rerun

*Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism* (SpecBranch, ICLR 2026,
[arXiv 2506.01979](https://arxiv.org/abs/2506.01979)). This is an independent implementation.

    python studies/10-paper/run.py            # {minutes}; then page.py writes this page
    python studies/10-paper/run.py --quick    # the same with less text, minutes

**We have the abstract. All other details come second-hand**: from public notes and reviews, and from the authors' repository, whose code
differs from the paper. So the threshold ε, k_max, c and what exactly is counted are not known to us, and published figures are as the notes
give them. They are from GPUs and other pairs; ours are simulated, or from a CPU. Simulated: {seeds} seeds of {tokens:,} tokens for the four pairs (three
for cells and sweeps), c = γ, a further draft row costs 0.03 of a step. Every figure here stands in
[`result.json`](../../studies/10-paper/result.json) or in a result file of the [benchmarks](benchmarks.md)."""


def hrad(result: Result) -> str:
    """Return the section on the trained predictor, from the study of it."""
    document = json.loads((ROOT / "studies" / "03-hrad" / "result.json").read_text())
    found = {(row["form"], row["method"]): row for row in document["replay"]}
    scores = {(row["layers"], row["training"]): row for row in document["scores"]}
    rows, over = [], dict[str, list[tuple[float, float, float]]]()
    for (layers, training), own in scores.items():
        cells = [str(layers), training, f"{own['accuracy']:.3f}", f"{own['log_loss']:.3f}"]
        for form in ("paper", "served"):
            row = found[form, f"{layers} layers, {training}"]
            over.setdefault(form, []).append(tuple(row["over_confidence"]))
            cells += [ranged(row["over_confidence"], 3), ranged(row["share_of_oracle"], 2)]
        rows.append(cells)
    heads = (
        "layers K", "training", "accuracy", "log loss", "the paper's form: speed over confidence alone",
        "share of the oracle's gain", "as served: speed over confidence alone", "share of the oracle's gain",
    )  # fmt: skip
    wins = {form: sum(low > 1 for _, low, _ in values) for form, values in over.items()}
    base = {form: {name: found[form, name] for name in ("confidence", "oracle", "all")} for form in over}
    curve = document["curve"]
    positions = document["positions"]
    return f"""## H-RAD

**Trained for the weak pair on {positions["train"]:,} positions and judged on prompts that it has not seen, H-RAD is faster than the draft's confidence
alone in {wins["paper"]} of {len(rows)} rows in the paper's form, and in {wins["served"]} of {len(rows)} as served (a row counts if its whole range is above 1).**

{document["pair"]["target"]} with its 0.5B without 6 of 24 layers, both in int8, {positions["all"]:,} positions, window = γ = c = 8. "As in the paper": cross-entropy,
the likeliest class. "By cost": thresholds on the probabilities, chosen by the speed of a replay of the held-out prompts, as are
the thresholds on the draft's confidence of all methods. Ranges: bootstrap over {document["replayed"]["test"]} prompts.

{table(heads, rows)}

Against confidence alone, an oracle has {ranged(base["paper"]["oracle"]["over_confidence"], 3)} in the paper's form and {ranged(base["served"]["oracle"]["over_confidence"], 3)} as served; a fixed
length has {ranged(base["paper"]["all"]["over_confidence"], 3)} and {ranged(base["served"]["all"]["over_confidence"], 3)}. Log loss of K = 4, by training positions:
{", ".join(f"{row['positions']:,}: {row['log_loss']:.3f}" for row in curve)}. More on [what it knows](../../studies/03-hrad/README.md)."""


def ranged(values: Sequence[float], digits: int) -> str:
    value, low, high = (f"{number:.{digits}f}" for number in values)
    return f"{value} ({low} to {high})"


TAIL = """## Where we differ

| the paper | here |
|---|---|
| after a miss the target waits for a draft | it goes on with what is drafted, or nothing; `wait_for_draft` brings the paper's form back |
| k = max(1, ⌊k_max (1 − confidence)⌋) branches | only branches that pay for their time; without `cost_aware` the paper's rule |
| drafted tokens beyond a cut are lost | they stay in the tree as the first branch |
| length of a branch bounded by c | the number of draft steps nearest to the measured c, at most γ |
| branches are copies of a cache | one tree; branches share their prefix, no cell is copied |
| H-RAD asks about every window | `specbranch` can ask it ([how to](../extend.md#train-a-predictor-h-rad)); `budget` does not, because [it adds next to nothing](../../studies/03-hrad/README.md#once-a-token-is-drafted) about a token whose own distribution is known |

Not to be had here: its pairs on GPUs, Spec-Bench, the baseline Lookahead, the cost of H-RAD (0.38 % of latency), t-SNE pictures."""


def page(result: Result) -> str:
    document = result.document
    head = HEAD.format(minutes="about half an hour on two cores", seeds=document["seeds"], tokens=document["tokens"])
    parts = (beats_pearl, main_table, rollback, ablation, hrad, lengths, theorem, sweeps, energy, batches)
    return "\n\n".join([head, *(part(result) for part in parts), TAIL]) + "\n"


def draw_pairs(result: Result) -> None:
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(11, 4.4), layout="constrained")
    labels = ("sps", "adaedl", "pearl", "specbranch, confidence", "specbranch, oracle", "specbranch, served", "budget")
    width = 0.11
    for index, label in enumerate(labels):
        rows = [result.row("pairs", pair, 0.0, label) for pair in PAIRS]
        places = [place + (index - (len(labels) - 1) / 2) * width for place in range(len(PAIRS))]
        axis.bar(
            places, [row["speed"] for row in rows], width * 0.92, yerr=[row["speed_sd"] or 0 for row in rows],
            color=COLORS[label], label=label, error_kw={"lw": 1},
        )  # fmt: skip
    for place, pair in enumerate(PAIRS):
        for value, name in zip(result.document["published"]["averages"][pair], ("PEARL", "SpecBranch"), strict=True):
            axis.hlines(value, place - 0.42, place + 0.42, color="#264653", lw=1, ls=":" if name == "PEARL" else "--")
    axis.hlines([], 0, 0, color="#264653", lw=1, ls=":", label="PEARL, published")
    axis.hlines([], 0, 0, color="#264653", lw=1, ls="--", label="SpecBranch, published")
    axis.set_xticks(range(len(PAIRS)), PAIRS)
    axis.set_ylabel("speed over plain decoding")
    finding = "budget is the fastest on all of the paper's four pairs" if is_budget_ahead(result) else "The four pairs"
    axis.set_title(f"{finding}: simulated, one request, a device for each model", loc="left", fontweight="bold")
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
    figure.savefig(HERE / "pairs.png", dpi=120)


def draw_sweeps(result: Result) -> None:
    figure, grid = load_pyplot().subplots(2, 3, figsize=(12.5, 7), layout="constrained")
    *axes, last = grid.flat
    last.set_visible(False)
    for axis, section, title in (
        (axes[0], "epsilon", "threshold ε"), (axes[1], "branches", "branches k_max"),
    ):  # fmt: skip
        for pair, line in ((WEAK, "-"), ("llama3-8b-70b", "--")):
            for predictor in ("confidence", "oracle"):
                rows = sorted(
                    (row["key"][2], row["speed"])
                    for row in result.document[section]
                    if row["key"][:2] == [pair, predictor]
                )
                axis.plot(
                    *zip(*rows, strict=True),
                    line,
                    marker="o",
                    ms=3,
                    color=COLORS[f"specbranch, {predictor}"],
                    label=f"{pair}, {predictor}",
                )
        axis.set_xlabel(title)
    for axis, section, title in (
        (axes[2], "gamma", "γ, at c = 8"), (axes[3], "c", "c = γ"), (axes[4], "acceptance", "acceptance, at c = γ = 8"),
    ):  # fmt: skip
        for label in ("pearl", "specbranch, confidence", "budget"):
            rows = sorted((row["key"][1], row["speed"]) for row in result.document[section] if row["key"][0] == label)
            axis.plot(*zip(*rows, strict=True), "-o", ms=3, color=COLORS[label], label=label)
        axis.set_xlabel(title)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("speed over plain decoding")
    axes[0].legend(frameon=False, fontsize=8)
    axes[2].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Simulated speed by setting: {WEAK} (solid), llama3-8b-70b (dashed)", x=0.01, ha="left", fontweight="bold"
    )
    figure.savefig(HERE / "sweeps.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not as it would be written"
    )
    parser.add_argument("--result", type=Path, default=HERE / "result.json")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    result = Result(json.loads(args.result.read_text()))
    if args.check:
        if args.out.read_text() != page(result):
            sys.exit("docs/dev/paper.md is not what studies/10-paper/page.py writes; run it")
        return
    args.out.write_text(page(result))
    draw_pairs(result)
    draw_sweeps(result)


if __name__ == "__main__":
    main()
