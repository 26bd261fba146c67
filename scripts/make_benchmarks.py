#!/usr/bin/env python3
"""Write docs/benchmarks.md and its figures from the committed result files. `--text` prints the page and draws nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specbranch.bench.figures import CAPTIONS, draw_figures
from specbranch.bench.report import NOTE, section_markdown, section_of
from specbranch.bench.results import read_results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE, FIGURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "img"
SUBJECT = "specbranch"
FILES = (
    "bench-flagship.jsonl",
    "bench-flagship-sampled.jsonl",
    "bench-flagship-peers.jsonl",
    "bench-planners.jsonl",
    "bench-duel.jsonl",
    "bench-duel-2.jsonl",
    "bench-rivals.jsonl",
    "bench-rivals-2.jsonl",
    "bench-windows.jsonl",
    "bench-weak.jsonl",
    "bench-small.jsonl",
    "bench-small-sampled.jsonl",
    "bench-flagship-load.jsonl",
    "bench-load.jsonl",
    "bench-off.jsonl",
    "bench-served.jsonl",
    "bench-served-flagship.jsonl",
)
INTRO = """# Benchmarks

Written by `scripts/make_benchmarks.py` from the result files that each section names; do not edit. [How it is
measured](bench.md). To run one again: `specbranch bench run scenarios/NAME.toml --data DIR --out FILE`. All of it ran on two
cores of one machine without a GPU, and only ratios within one run count: the machine itself, which
others share, is up to twice as slow from hour to hour, and not always on both cores alike."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    page = make_page(draws=not args.text)
    if args.text:
        print(page, end="")
    else:
        PAGE.write_text(page)


def make_page(draws: bool) -> str:
    """The whole page; figures are drawn only if asked, and linked in any case."""
    parts = [INTRO, NOTE]
    for name in FILES:
        if not (RESULTS / name).exists():
            continue
        results = read_results(RESULTS / name)
        section = section_of(results, SUBJECT)
        stem = Path(name).stem
        if draws:
            for path in _drawn(stem):
                path.unlink()
            section.figures = draw_figures(results, FIGURES, stem)
            for _, path in section.figures:
                path.with_suffix(".png").unlink()  # the page shows the other
        else:
            section.figures = [(_caption(path), path) for path in _drawn(stem)]
        parts.append(section_markdown(section, "img/"))
    parts += [_forecasts(), _map()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _forecasts() -> str:
    path = RESULTS / "forecast_check.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    lines = [
        "| result file | task | method | real | forecast | error | by `plan` | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        planned = f"{row['planned']:.2f} | {row['planned_error']:+.0%}" if "planned" in row else " | "
        lines.append(
            f"| {row['file']} | {row['task']} | {row['method']} | {row['real']:.2f} ({row['low']:.2f}-{row['high']:.2f}) | "
            f"{row['forecast']:.2f} | {row['error']:+.0%} | {planned} |"
        )
    text = (
        f"Speed over bare vLLM, real and simulated on recorded traces of the same tasks, with the step times of the run "
        f"itself: median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}."
    )
    if "median_planned_error" in found:
        text += (
            f" With the step times that `specbranch plan` measured in two minutes at another time: median "
            f"{found['median_planned_error']:.1%}, worst {found['worst_planned_error']:.1%}."
        )
    source = "(`scripts/forecast_check.py`, [`results/forecast_check.json`](../results/forecast_check.json))"
    return f"## Forecasts against real runs\n\n{text} {source}\n\n" + "\n".join(lines)


def _map() -> str:
    path = RESULTS / "scale_map.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    lines = [
        "| pair | PEARL, simulated | SpecBranch, simulated | SpecBranch, published |",
        "|---|---|---|---|",
        *(
            f"| {row['pair']} | {row['pearl']:.2f} | {row['specbranch']:.2f} | {row['published_specbranch']:.2f} |"
            for row in found["published"]
        ),
    ]
    of_ssd = [
        "| c, not published | acceptance, solved | SSD, simulated | SSD, published | specbranch | budget |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['c']:g} | {row['acceptance']:.2f} | {row['ssd']:.2f} | {row['published']['ssd']:.2f} "
            f"| {row['specbranch']:.2f} | {row['budget']:.2f} |"
            for row in found["published_ssd"]
        ),
    ]
    return "\n\n".join(
        (
            "## Where it pays, simulated",
            "Made texts, a further draft row at 3 % of a step, a target step that doubles at 256 tokens: assumptions that "
            "fit a GPU better than this machine. Devices are counted: a draft device for each target halves the lower "
            "row. (`scripts/scale_map.py`, [`results/scale_map.json`](../results/scale_map.json))",
            "![Speed by c, acceptance, requests at once and targets that share a draft](img/scale-map.png)",
            "The published points as a check; acceptance is solved from PEARL's published speed, so only SpecBranch's is "
            "foretold:",
            "\n".join(lines),
            "SSD's point (Llama 70B on four devices, 1B on a fifth, window 7, 24 guesses); acceptance is solved from its "
            "figure for plain speculation, 2.96, at three c:",
            "\n".join(of_ssd),
        )
    )


def _drawn(stem: str) -> list[Path]:
    return [path for name in CAPTIONS if (path := FIGURES / f"{stem}-{name}.svg").exists()]


def _caption(path: Path) -> str:
    return CAPTIONS[path.stem.rpartition("-")[2]]


if __name__ == "__main__":
    main()
