#!/usr/bin/env python
"""Draw the run that benchmarks/readme.py has kept as a moving picture: the same answer without drafts and with them.

benchmarks/recording.py [--result benchmarks/readme.json] [--out docs/img/generate.svg]

Every piece of text appears when it came, on one clock for both. Viewers that cannot show motion show the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLUMNS, MAX_LINES = 52, 22
CHARACTER, LINE = 7.25, 17  # pixels
PANE, GAP, TOP, MARGIN = 410, 20, 62, 18
MAX_S = 16.0  # of the picture; longer runs are shown faster, and it says so
STILL_S = 4.0  # at the end
LANES = {"without drafts": "vLLM alone, both cores", "with drafts": "with SpecBranch, both cores"}
INK, DIM, GREEN, PAPER, SHEET = "#d7dce2", "#8b949e", "#56d364", "#0d1117", "#161b22"

Words = tuple[float, int, int, str, bool]  # seconds, line, column, text, whether it was drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "readme.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "generate.svg")
    args = parser.parse_args()
    args.out.write_text(draw(json.loads(args.result.read_text())))


def draw(document: dict[str, Any]) -> str:
    """The picture of a kept run."""
    lanes = {name: list(laid_out(document["pieces"][name])) for name in LANES}
    end_s = max(words[-1][0] for words in lanes.values())
    pace = max(1.0, end_s / MAX_S)
    num_lines = min(MAX_LINES, 1 + max(line for words in lanes.values() for _, line, *_ in words))
    width, height = 2 * PANE + GAP + 2 * MARGIN, TOP + num_lines * LINE + 34
    body = [
        element
        for index, (name, title) in enumerate(LANES.items())
        for element in pane(MARGIN + index * (PANE + GAP), title, lanes[name], pace, num_lines)
    ]
    note = f"played at {pace:.1f}x" if pace > 1 else "in real time"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
            "<title>The same answer by vLLM alone and with SpecBranch, text by text as it came</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"><animate id="run" attributeName="rx" from="8"'
            f' to="8" begin="0s;run.end" dur="{end_s / pace + STILL_S:.2f}s"/></rect>',
            *body,
            f'<text x="{MARGIN}" y="{height - 14}" fill="{DIM}">Green: drafted and accepted. {note.capitalize()}.</text>',
            "</svg>\n",
        ]
    )


def pane(left: float, title: str, words: Sequence[Words], pace: float, num_lines: int) -> Iterator[str]:
    """One answer: its title, its texts, and how long it took."""
    height = TOP + (num_lines - 1) * LINE
    yield f'<rect x="{left}" y="12" width="{PANE}" height="{height}" rx="6" fill="{SHEET}"/>'
    yield f'<text x="{left + 12}" y="33" fill="{INK}" font-weight="bold">{escape(title)}</text>'
    end_s = words[-1][0]
    seconds = f"{end_s:.1f} s"
    x = left + PANE - 12 - len(seconds) * CHARACTER
    yield f'<text x="{x:.1f}" y="33" fill="{INK}">{seconds}{appearing(end_s / pace)}</text>'
    for at_s, line, column, text, is_drafted in words:
        if line >= num_lines:
            continue
        x, y = left + 12 + column * CHARACTER, TOP + line * LINE
        color = GREEN if is_drafted else INK
        yield (
            f'<text x="{x:.1f}" y="{y}" fill="{color}" textLength="{len(text) * CHARACTER:.1f}" xml:space="preserve">'
            f"{escape(text)}{appearing(at_s / pace)}</text>"
        )


def appearing(at_s: float) -> str:
    """Hides what it stands in until then, each time that the picture begins."""
    return f'<set attributeName="visibility" to="hidden" begin="run.begin" dur="{at_s:.2f}s"/>'


def laid_out(pieces: Sequence[dict[str, Any]]) -> Iterator[Words]:
    """Where each text of an answer stands, and when it came; lines are broken at the border of a pane."""
    line = column = 0
    for piece in pieces:
        for text, is_drafted in piece["runs"]:
            for index, part in enumerate(text.expandtabs(4).split("\n")):
                if index:
                    line, column = line + 1, 0
                while part:
                    if column == COLUMNS:
                        line, column = line + 1, 0
                    fitting, part = part[: COLUMNS - column], part[COLUMNS - column :]
                    yield piece["at_s"], line, column, fitting, is_drafted
                    column += len(fitting)


if __name__ == "__main__":
    main()
