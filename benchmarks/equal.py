#!/usr/bin/env python
"""The things that `specbranch bench run benchmarks/equal.toml` does not do itself.

benchmarks/equal.py draw     # README's bars, from equal.jsonl
benchmarks/equal.py check    # are the kept bars those of equal.jsonl?
benchmarks/equal.py words    # README's sentences on them
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from specbranch.bench.results import Record, read_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
from benchmarks.drawing import svg

RESULT = HERE / "equal.jsonl"
FIGURE = ROOT / "docs" / "img" / "equal.svg"
# How README calls the methods, from the slowest kind to ours.
NAMES = {
    "bare": "vLLM alone",
    "suffix": "vLLM, suffix decoding",
    "text": "SpecBranch, no draft model",
    "budget": "SpecBranch, draft model",
}
BARE, PEER, TEXT, OWN = NAMES
RESAMPLES = 1000
LEFT, BAR, TOP, ROW = 248, 296, 126, 40  # pixels
COLORS = {BARE: "plain", PEER: "plain", TEXT: "target", OWN: "target"}

Prompt = tuple[str, int]  # task, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("draw").set_defaults(run=lambda: svg.write_or_check({FIGURE: picture()}, is_check=False))
    commands.add_parser("check").set_defaults(run=lambda: svg.write_or_check({FIGURE: picture()}, is_check=True))
    commands.add_parser("words").set_defaults(run=lambda: print(words()))
    parser.parse_args().run()


def lanes() -> dict[str, list[Record]]:
    """The answers of each method."""
    records = read_results(RESULT).records
    return {name: [one for one in records if one["method"] == name] for name in NAMES}


def picture() -> str:
    """Return README's bars: tokens per second over all prompts, with the spread of resampled prompts."""
    results = read_results(RESULT)
    scenario, answers = results.scenario, lanes()
    rows = {name: (rate(own), *spread(own)) for name, own in answers.items()}
    scale = BAR / max(high for _, _, high in rows.values())
    height = TOP + ROW * len(rows) + 62
    assert scenario.target_cores == scenario.draft_cores, "the title says that all share the same cores"
    title = f"On {svg.number(len(scenario.target_cores))} CPU cores: SpecBranch {rows[OWN][0]:.1f} tokens/s, vLLM alone {rows[BARE][0]:.1f}"
    models = f"{svg.model_name(scenario.target)}; draft model {svg.model_name(scenario.draft)}. One request at a time."
    lines = [
        svg.text(16, 32, title, size=17, bold=True),
        svg.text(16, 54, models, "dim"),
        svg.text(16, 74, f"{svg.describe_cpu(results.provenance)}; all ways use the same two cores.", "dim"),
        svg.text(LEFT, TOP - 14, "tokens per second (95 % range)", "dim"),
    ]
    for index, (name, (speed, low, high)) in enumerate(rows.items()):
        y, is_ours = TOP + ROW * index, name in (TEXT, OWN)
        ends = LEFT + scale * low, LEFT + scale * high
        lines += [
            svg.text(LEFT - 10, y + 20, NAMES[name], anchor="end", bold=is_ours),
            svg.rect(LEFT, y, scale * speed, ROW - 12, COLORS[name], radius=2),
            svg.line(_whisker(*ends, y + (ROW - 12) / 2), "paper", width=5),
            svg.line(_whisker(*ends, y + (ROW - 12) / 2), "ink", width=2),
            svg.text(round(ends[1] + 10, 1), y + 20, f"{speed:.1f}", size=15, bold=True),
            svg.text(round(ends[1] + 42, 1), y + 20, f"({low:.1f} to {high:.1f})", "dim"),
        ]
    lines += [
        svg.text(16, height - 40 + 20 * place, note, "dim", size=13) for place, note in enumerate(_notes(answers))
    ]
    return svg.document(title, height, lines)


def _whisker(low: float, high: float, y: float) -> str:
    return f"M{low:.1f} {y:g}H{high:.1f}M{low:.1f} {y - 6:g}v12M{high:.1f} {y - 6:g}v12"


def _notes(answers: dict[str, list[Record]]) -> tuple[str, str]:
    prompts = {(one["task"], one["prompt"]) for one in answers[OWN]}
    firsts = sorted(first_s(own) for own in answers.values())
    first = " to ".join(dict.fromkeys(f"{one:.1f}" for one in (firsts[0], firsts[-1])))
    return (
        f"{len(prompts)} prompts of {len({task for task, _ in prompts})} tasks, from request to last token. The first token comes "
        f"after {first} s in each.",
        "Ranges: 95 % of resamples of the prompts.",
    )


def words() -> str:
    """Return README's table of these bars, below a sentence on what was run."""
    rows = lanes()
    num_tasks = len({one["task"] for one in rows[OWN]})
    num_prompts = len({(one["task"], one["prompt"]) for one in rows[OWN]})
    intro = (
        f"Qwen2.5-Coder-1.5B in int8 with its 0.5B draft model, one request at a time, greedy, at most 64 tokens, {num_prompts} prompts "
        f"of {num_tasks} tasks, all on the same two cores with AVX-512 and without AMX. In brackets are 95 % ranges over the prompts."
    )
    table = ["| on the same two cores | speed | relative to `suffix` | time to first token |", "|---|---|---|---|"]
    for name in NAMES:
        speed = "1" if name == BARE else paired(rows[name], rows[BARE])
        to_peer = {BARE: "", PEER: "1"}.get(name) or paired(rows[name], rows[PEER])
        table.append(f"| {NAMES[name]} | {speed} | {to_peer} | {first_s(rows[name]) / first_s(rows[BARE]):.2f} |")
    folded = textwrap.fill(intro, 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join([folded, "", *table])


def paired(ours: Sequence[Record], other: Sequence[Record]) -> str:
    """The ratio of the rates with its range, both resampled with the same prompts."""
    picks = resamples(ours)
    ratios = sorted(rate(_chosen(ours, pick)) / rate(_chosen(other, pick)) for pick in picks)
    low, high = ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]
    return f"{rate(ours) / rate(other):.2f} ({low:.2f}-{high:.2f})"


def rate(records: Sequence[Record]) -> float:
    """Tokens per second over all of these answers."""
    return float(sum(one["tokens"] for one in records) / sum(one["elapsed_s"] for one in records))


def first_s(records: Sequence[Record]) -> float:
    """Mean time to the first token."""
    return float(sum(one["first_s"] for one in records) / len(records))


def spread(records: Sequence[Record]) -> tuple[float, float]:
    """Where 95 % of the rates lie if prompts are resampled."""
    rates = sorted(rate(_chosen(records, pick)) for pick in resamples(records))
    return rates[int(0.025 * RESAMPLES)], rates[int(0.975 * RESAMPLES) - 1]


def resamples(records: Sequence[Record]) -> list[list[Prompt]]:
    """Draws of as many prompts as there are, with repetition, within each task; the same for all methods."""
    tasks: dict[str, list[Prompt]] = {}
    for key in sorted({(one["task"], one["prompt"]) for one in records}):
        tasks.setdefault(key[0], []).append(key)
    order = random.Random(0)
    return [[order.choice(own) for own in tasks.values() for _ in own] for _ in range(RESAMPLES)]


def _chosen(records: Sequence[Record], pick: Sequence[Prompt]) -> list[Record]:
    """The answers to these prompts, all repeats of each."""
    by_prompt: dict[Prompt, list[Record]] = {}
    for one in records:
        by_prompt.setdefault((one["task"], one["prompt"]), []).append(one)
    return [one for prompt in pick for one in by_prompt[prompt]]


if __name__ == "__main__":
    main()
