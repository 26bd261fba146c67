#!/usr/bin/env python
"""Draw the run that benchmarks/readme.py has kept as a moving picture: the same answer without drafts and with them.

benchmarks/recording.py [--result benchmarks/readme.json] [--out docs/img/generate.svg] [--check]

Every piece of text appears when it came, on one clock for both. The picture plays three times, then stands still. It shows
the end at once to readers who prefer less motion, and in viewers that cannot show any. `--check` only compares the file
with what would be drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.drawing import svg

COLUMNS, MAX_LINES = 40, 22
FONT, CHARACTER, LINE = 13, 7.83, 19  # pixels
PANE, TOP, MARGIN = 336, 150, 8
MAX_S = 16.0  # of the picture; longer runs are shown faster, and it says so
STILL_S = 5.0  # at the end
PLAYS = 3
TICK_S = 0.1  # of the clocks
LANES = {"without drafts": "vLLM alone", "with drafts": "with SpecBranch"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some characters of an answer: when they came, where they stand, and whether they were drafted and accepted."""

    at_s: float
    line: int
    column: int
    text: str
    is_drafted: bool


@dataclass(frozen=True, slots=True)
class Film:
    """How the seconds of the run become those of the picture."""

    pace: float
    end_s: float  # of the run

    @property
    def cycle_s(self) -> float:
        """How long one play takes, with the pause behind it."""
        return self.end_s / self.pace + STILL_S

    def share(self, at_s: float) -> float:
        """Which share of a play is over when the run is at that second, in percent."""
        return 100 * at_s / self.pace / self.cycle_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "readme.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "generate.svg")
    parser.add_argument("--check", action="store_true", help="only check that the file is the picture of the result")
    args = parser.parse_args()
    svg.write_or_check({args.out: draw(json.loads(args.result.read_text()))}, args.check)


def draw(document: dict[str, Any]) -> str:
    """The picture of a kept run."""
    lanes = {name: list(laid_out(document["pieces"][name])) for name in LANES}
    ends_s = {name: pieces[-1].at_s for name, pieces in lanes.items()}
    film = Film(max(1.0, max(ends_s.values()) / MAX_S), max(ends_s.values()))
    num_lines = min(MAX_LINES, 1 + max(piece.line for pieces in lanes.values() for piece in pieces))
    bottom = TOP + num_lines * LINE
    panes = [
        element
        for index, (name, title) in enumerate(LANES.items())
        for element in pane(index, title, lanes[name], film, num_lines)
    ]
    without, with_drafts = ends_s.values()
    num_tokens = document["lines"][0].partition(" ")[0]
    result = f"The same {num_tokens} tokens on the same {cores(document)} CPU cores: {with_drafts:.1f} s instead of {without:.1f} s"
    note = (
        "Recorded run, played in real time."
        if film.pace == 1
        else "Recorded run, shortened: a second of the picture is"
    )
    if film.pace > 1:
        note += f" {film.pace:.1f} s of the run, on both sides."
    target, draft = (svg.model_name(document["models"][side]) for side in ("target", "draft"))
    body = [
        svg.text(16, 30, result, size=15.5, bold=True),
        svg.text(16, 54, f"{target}; draft model {draft}.", "dim"),
        svg.text(16, 74, f"{svg.describe_cpu(document['provenance'])}. One prompt, one run.", "dim"),
        *panes,
        svg.text(16, bottom + 24, "Green: drafted, and accepted by the target.", "good"),
        svg.text(svg.WIDTH - 16, bottom + 24, note, "dim", anchor="end"),
    ]
    return svg.document(f"{result}, text by text as it came", bottom + 40, body, svg.DARK, style(lanes, film))


def cores(document: dict[str, Any]) -> str:
    """The number of cores that both had, as the kept line of the run without drafts names them."""
    named = document["lines"][-1].partition("cores ")[2].partition(" ")[0].split(",")
    return svg.number(len(named))


def style(lanes: dict[str, list[Piece]], film: Film) -> str:
    """Rules that hide each piece until it comes and let the clocks run, unless the reader prefers less motion."""
    moments = sorted({piece.at_s for pieces in lanes.values() for piece in pieces})
    frames = [
        f"@keyframes {moment(at_s)} {{ 0% {{ visibility: hidden }} {film.share(at_s):.2f}%, 100% {{ visibility: visible }} }}\n"
        f".{moment(at_s)} {{ animation-name: {moment(at_s)} }}"
        for at_s in moments
    ]
    for index, pieces in enumerate(lanes.values()):
        ticks = num_ticks(pieces)
        end = f"transform: translateY({-LINE * ticks}px)"
        frames += [
            f".clock{index} {{ {end} }}",
            f"@keyframes clock{index} {{ 0% {{ transform: none; animation-timing-function: steps({ticks}, end) }}"
            f" {film.share(ticks * TICK_S):.2f}%, 100% {{ {end} }} }}",
            f".clock{index} {{ animation-name: clock{index} }}",
        ]
    moving = f".moving {{ animation-duration: {film.cycle_s:.2f}s; animation-timing-function: step-end; animation-iteration-count: {PLAYS} }}"
    still = "@media (prefers-reduced-motion: reduce) { .moving { animation: none } }"
    mono = f".mono {{ font-family: {svg.MONO}; white-space: pre }}"
    return "\n".join(["", mono, moving, *frames, still])


def moment(at_s: float) -> str:
    return f"t{round(1000 * at_s)}"


def num_ticks(pieces: Sequence[Piece]) -> int:
    """At how many values after zero a clock stops."""
    return round(pieces[-1].at_s / TICK_S)


def pane(index: int, title: str, pieces: Sequence[Piece], film: Film, num_lines: int) -> Iterator[str]:
    """One answer: its title, its clock, and its text."""
    left = MARGIN + index * (PANE + svg.WIDTH - 2 * (PANE + MARGIN))
    yield svg.rect(left, 88, PANE, TOP - 88 + num_lines * LINE, "sheet", radius=6)
    yield svg.text(left + 12, 113, title, size=16, bold=True)
    yield from clock(index, left + PANE - 12, 113, num_ticks(pieces))
    yield f'<g class="mono" font-size="{FONT}">'
    for piece in pieces:
        if piece.line < num_lines and piece.text.strip():
            x, y = left + 12 + piece.column * CHARACTER, TOP + piece.line * LINE
            name = "good" if piece.is_drafted else "ink"
            yield (
                f'<text x="{x:.1f}" y="{y}" class="{name} moving {moment(piece.at_s)}"'
                f' textLength="{len(piece.text) * CHARACTER:.1f}" xml:space="preserve">{escape(piece.text, quote=False)}</text>'
            )
    yield "</g>"


def clock(index: int, right: float, y: float, ticks: int) -> Iterator[str]:
    """A window on a strip with all values of the clock, which moves up; at rest it shows the last one."""
    yield f'<clipPath id="window{index}"><rect x="{right - 80:g}" y="{y - 15:g}" width="80" height="{LINE}"/></clipPath>'
    yield f'<g clip-path="url(#window{index})"><g class="moving clock{index} ink" font-size="16" font-weight="bold" text-anchor="end">'
    yield "".join(
        f'<text x="{right:g}" y="{y + LINE * tick:g}">{tick * TICK_S:.1f} s</text>' for tick in range(ticks + 1)
    )
    yield "</g></g>"


def laid_out(pieces: Sequence[dict[str, Any]]) -> Iterator[Piece]:
    """Where each text of an answer stands, and when it came; long lines are broken between words."""
    whole = "".join(text for piece in pieces for text, _ in piece["runs"])
    origin = [(piece["at_s"], is_drafted) for piece in pieces for text, is_drafted in piece["runs"] for _ in text]
    line, start = 0, 0
    for written in whole.split("\n"):
        for from_, to, indent in wrapped(written):
            places = range(start + from_, start + to)
            column = indent
            for (at_s, is_drafted), group in groupby(places, key=origin.__getitem__):
                text = "".join(whole[place] for place in group)
                yield from _split(Piece(at_s, line, column, text, is_drafted))
                column += len(text)
            line += 1
        start += len(written) + 1


def _split(piece: Piece) -> Iterator[Piece]:
    """The piece without the spaces at its beginning, which need no element."""
    text = piece.text.lstrip(" ")
    if text:
        yield replace(piece, text=text, column=piece.column + len(piece.text) - len(text))


def wrapped(written: str) -> Iterator[tuple[int, int, int]]:
    """Begin, end and indent of each line that a written line takes; a word that is too long is cut."""
    margin = len(written) - len(written.lstrip(" "))
    start, indent = 0, 0
    while len(written) - start > COLUMNS - indent:
        room = start + COLUMNS - indent
        space = written.rfind(" ", start + (margin if start == 0 else 0) + 1, room + 1)
        end = room if space < 0 else space
        yield start, end, indent
        start, indent = end + (space >= 0), min(margin + 2, COLUMNS // 2)
    yield start, len(written), indent


if __name__ == "__main__":
    main()
