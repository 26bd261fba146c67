#!/usr/bin/env python
"""The two things that `specbranch bench run benchmarks/equal.toml` does not do itself.

benchmarks/equal.py draw     # README's bars, from equal.jsonl
benchmarks/equal.py words    # README's sentences on them
"""

from __future__ import annotations

import argparse
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path

from specbranch.bench.results import Record, read_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULT = HERE / "equal.jsonl"
FIGURE = ROOT / "docs" / "img" / "equal.svg"
# How README calls the methods, from the slowest kind to ours.
NAMES = {
    "bare": "vLLM alone",
    "suffix": "vLLM with suffix",
    "text": "SpecBranch, no draft model",
    "budget": "SpecBranch, draft model",
}
BARE, PEER, TEXT, OWN = NAMES
RESAMPLES = 1000
WIDTH, MARGIN, LEFT, BAR, TOP, ROW = 860, 18, 230, 430, 62, 34  # pixels
GREY, BLUE, GREEN, INK, DIM = "#9aa5b1", "#457b9d", "#0b7a75", "#1f2933", "#52606d"
COLORS = {BARE: GREY, PEER: BLUE, TEXT: GREEN, OWN: GREEN}

Prompt = tuple[str, int]  # task, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("draw").set_defaults(run=lambda: FIGURE.write_text(picture()))
    commands.add_parser("words").set_defaults(run=lambda: print(words()))
    parser.parse_args().run()


def lanes() -> dict[str, list[Record]]:
    """The answers of each method."""
    records = read_results(RESULT).records
    return {name: [one for one in records if one["method"] == name] for name in NAMES}


def picture() -> str:
    """Return README's bars: tokens per second over all prompts, with the spread of resampled prompts."""
    rows = {name: (rate(own), *spread(own), first_s(own)) for name, own in lanes().items()}
    scale = BAR / max(high for _, _, high, _ in rows.values())
    height = TOP + ROW * len(rows) + 44
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15">',
        "<title>Tokens per second of four ways to use the same two CPU cores</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="26" fill="{INK}" font-weight="bold">Qwen2.5-Coder-1.5B (int8) on two CPU cores, one request at a '
        "time</text>",
        f'<text x="{LEFT}" y="50" fill="{DIM}">tokens per second</text>',
        f'<text x="{WIDTH - MARGIN}" y="50" fill="{DIM}" text-anchor="end">first token after</text>',
    ]
    for index, (name, (speed, low, high, first)) in enumerate(rows.items()):
        y = TOP + ROW * index
        weight = ' font-weight="bold"' if name in (TEXT, OWN) else ""
        ends = LEFT + scale * low, LEFT + scale * high
        lines += [
            f'<text x="{LEFT - 12}" y="{y + 21}" text-anchor="end" fill="{INK}"{weight}>{NAMES[name]}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{scale * speed:.1f}" height="{ROW - 10}" rx="2" fill="{COLORS[name]}"/>',
            f'<path d="M{ends[0]:.1f} {y + 16}H{ends[1]:.1f}M{ends[0]:.1f} {y + 12}v8M{ends[1]:.1f} {y + 12}v8"'
            f' stroke="{INK}" stroke-width="1.4"/>',
            f'<text x="{ends[1] + 10:.1f}" y="{y + 21}" fill="{INK}" font-weight="bold">{speed:.1f}</text>',
            f'<text x="{WIDTH - MARGIN}" y="{y + 21}" fill="{INK}" text-anchor="end">{first:.1f} s</text>',
        ]
    note = "From request to last token, over all prompts. Lines: 95 % of resamples of the prompts."
    return "\n".join([*lines, f'<text x="{MARGIN}" y="{height - 16}" fill="{DIM}">{note}</text>', "</svg>\n"])


def words() -> str:
    """Return README's sentences on these bars."""
    rows = lanes()
    tasks = {one["task"] for one in rows[OWN]}
    num_prompts = len({(one["task"], one["prompt"]) for one in rows[OWN]})
    over = {name: {other: paired(rows[name], rows[other]) for other in NAMES} for name in (TEXT, OWN)}
    late = first_s(rows[OWN]) / first_s(rows[BARE])
    parts = (
        f"Qwen2.5-Coder-1.5B in int8, greedy, at most 64 tokens, {num_prompts} prompts of {len(tasks)} tasks, on two cores with "
        f"AVX-512 and without AMX. With its 0.5B draft model SpecBranch has {over[OWN][BARE]} times the speed of vLLM alone on the "
        f"same two cores, and {over[OWN][PEER]} times that of vLLM's `suffix` at the better of two settings; without a "
        f"draft model {over[TEXT][BARE]} and {over[TEXT][PEER]} times. The first token comes after {late:.2f} times as long as "
        "with vLLM alone."
    )
    return textwrap.fill(parts, 124, break_long_words=False, break_on_hyphens=False)


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
