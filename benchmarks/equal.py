#!/usr/bin/env python
"""The two things that `specbranch bench run benchmarks/equal.toml` does not do itself.

benchmarks/equal.py llamacpp FILE.gguf --data DIR   # llama.cpp alone on both cores, the same prompts once: equal-llamacpp.json
benchmarks/equal.py draw                            # README's bars, from equal.jsonl and equal-llamacpp.json
benchmarks/equal.py words                           # README's sentences on them
"""

from __future__ import annotations

import argparse
import json
import os
import random
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbranch.bench.results import Record, read_results
from specbranch.bench.scenario import read_prompts, read_scenario
from specbranch.machine import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIGURE = ROOT / "docs" / "img" / "equal.svg"
# How README calls the methods, from the slowest kind to ours.
NAMES = {
    "bare": "vLLM, one core",
    "bare, both cores": "vLLM, both cores",
    "draft_model, both cores": "vLLM draft_model, both cores",
    "ngram, both cores": "vLLM ngram, both cores",
    "suffix, both cores": "vLLM suffix, both cores",
    "budget": "SpecBranch, one core each",
}
LLAMACPP = "llama.cpp, 4 bits, both cores"
OWN = "budget"
PEERS = ("draft_model, both cores", "ngram, both cores", "suffix, both cores")
RESAMPLES = 1000
WIDTH, MARGIN, LEFT, BAR, TOP, ROW = 860, 18, 270, 390, 40, 30  # pixels
GREY, PEER, OURS, INK, DIM = "#9aa5b1", "#457b9d", "#0b7a75", "#1f2933", "#52606d"

Prompt = tuple[str, int]  # task, number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("llamacpp")
    measure.add_argument("gguf", type=Path)
    measure.add_argument("--data", type=Path, required=True)
    measure.set_defaults(run=lambda args: run_llamacpp(args.gguf, args.data))
    commands.add_parser("draw").set_defaults(run=lambda args: FIGURE.write_text(picture()))
    commands.add_parser("words").set_defaults(run=lambda args: print(words()))
    args = parser.parse_args()
    args.run(args)


def run_llamacpp(gguf: Path, data: Path) -> None:
    """Let llama.cpp answer the prompts of equal.toml, greedily, and keep the times."""
    import llama_cpp
    from llama_cpp import Llama

    scenario = read_scenario(HERE / "equal.toml")
    cores = sorted(os.sched_getaffinity(0))
    model = Llama(
        str(gguf), n_ctx=scenario.max_model_len, n_threads=len(cores), n_threads_batch=len(cores), verbose=False
    )
    template = model.metadata["tokenizer.chat_template"]
    document = {"provenance": {**provenance(), "llama_cpp": llama_cpp.__version__, "model": gguf.name, "cores": cores}}
    records: list[Record] = []
    answer_one(model, template, "Count from one to ten.", 8)
    for chosen in scenario.prompts:
        for number, message in enumerate(read_prompts(chosen.task, data / chosen.file, chosen.count)):
            times_s = answer_one(model, template, message, scenario.max_tokens)
            record = {"task": chosen.task, "prompt": number, "repeat": 0, "tokens": len(times_s)}
            records.append({**record, "first_s": times_s[0], "elapsed_s": times_s[-1]})
            print(records[-1], flush=True)
    (HERE / "equal-llamacpp.json").write_text(json.dumps({**document, "records": records}) + "\n")


def answer_one(model: Any, template: str, message: str, max_tokens: int) -> list[float]:
    """When each token of the answer came, in seconds since the question."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    formatter = Jinja2ChatFormatter(template, eos_token="<|im_end|>", bos_token="")
    text = formatter(messages=[{"role": "user", "content": message}]).prompt
    tokens = model.tokenize(text.encode(), add_bos=False, special=True)
    model.reset()
    begin_s, times_s = time.monotonic(), []
    for token in model.generate(tokens, temp=0.0, repeat_penalty=1.0, reset=True):
        times_s.append(time.monotonic() - begin_s)
        if token == model.token_eos() or len(times_s) == max_tokens:
            return times_s
    return times_s


def lanes() -> dict[str, list[Record]]:
    """The answers of each method under the name that README gives it, in README's order."""
    records = read_results(HERE / "equal.jsonl").records
    own = {title: [one for one in records if one["method"] == name] for name, title in NAMES.items()}
    return {**own, LLAMACPP: json.loads((HERE / "equal-llamacpp.json").read_text())["records"]}


def picture() -> str:
    """Return README's bars: tokens per second over all prompts, with the spread of resampled prompts."""
    rows = {title: (rate(own), *spread(own), first_s(own)) for title, own in lanes().items()}
    scale = BAR / max(high for _, _, high, _ in rows.values())
    height = TOP + ROW * len(rows) + 44
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14">',
        "<title>Tokens per second of seven ways to use the same two cores</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" fill="{DIM}">tokens per second</text>',
        f'<text x="{WIDTH - MARGIN}" y="26" fill="{DIM}" text-anchor="end">first token after</text>',
    ]
    for index, (title, (speed, low, high, first)) in enumerate(rows.items()):
        y = TOP + ROW * index
        is_ours = title == NAMES[OWN]
        color = OURS if is_ours else PEER if title in (NAMES[name] for name in PEERS) else GREY
        weight = ' font-weight="bold"' if is_ours else ""
        ends = LEFT + scale * low, LEFT + scale * high
        lines += [
            f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end" fill="{INK}"{weight}>{title}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{scale * speed:.1f}" height="{ROW - 8}" rx="2" fill="{color}"/>',
            f'<path d="M{ends[0]:.1f} {y + 14}H{ends[1]:.1f}M{ends[0]:.1f} {y + 10}v8M{ends[1]:.1f} {y + 10}v8"'
            f' stroke="{INK}" stroke-width="1.4"/>',
            f'<text x="{ends[1] + 10:.1f}" y="{y + 19}" fill="{INK}" font-weight="bold">{speed:.1f}</text>',
            f'<text x="{WIDTH - MARGIN}" y="{y + 19}" fill="{INK}" text-anchor="end">{first:.1f} s</text>',
        ]
    note = "From request to last token, over all prompts. Lines: 95 % of resamples of the prompts."
    return "\n".join([*lines, f'<text x="{MARGIN}" y="{height - 16}" fill="{DIM}">{note}</text>', "</svg>\n"])


def words() -> str:
    """Return README's sentences on these bars."""
    rows = lanes()
    ours = rows[NAMES[OWN]]
    over = {name: paired(ours, rows[NAMES[name]]) for name in NAMES if name != OWN}
    best = max(PEERS, key=lambda name: rate(rows[NAMES[name]]))
    parts = [
        "Qwen2.5-Coder-1.5B in int8 with its 0.5B draft, greedy, at most 64 tokens, 24 prompts of four tasks twice, on two "
        f"cores with AVX-512 and without AMX. SpecBranch as installed has {over['bare, both cores']} times the speed of vLLM "
        f"alone on the same two cores, and {over[best]} times that of the best other method in vLLM, "
        f"`{best.split(',')[0]}`. Against vLLM on one core, as where the draft's core is one that the target could not use, it "
        f"has {over['bare']} times."
    ]
    return textwrap.fill(" ".join(parts), 124, break_long_words=False, break_on_hyphens=False)


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
