#!/usr/bin/env python
"""Draw docs/img/architecture-light.svg and architecture-dark.svg: which process does what, and what goes between them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.drawing import svg  # noqa: E402

PICTURES = {theme: ROOT / "docs" / "img" / f"architecture-{theme}.svg" for theme in svg.THEMES}
TITLE = "The draft model works in a service of its own, beside vLLM"
PROMISE = "If the draft service dies, vLLM goes on; only speed changes."
HEIGHT = 464
LEFT, LEFT_WIDTH, RIGHT, RIGHT_WIDTH = 16, 236, 404, 280  # of the boxes, pixels
MIDDLE = (LEFT + LEFT_WIDTH + RIGHT) / 2
TOP, BOTTOM = 130, 336  # of vLLM and the draft service

HEADS = "<defs>{}</defs>".format(
    "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="9" markerHeight="9"'
        f' markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" class="{name}"/></marker>'
        for name in ("ink", "plain")
    )
)
_OWN = "\n.own {{ stroke: {draft}; stroke-width: 2 }} .dashed {{ stroke: {plain}; stroke-dasharray: 5 4 }}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that the files are what this script draws")
    svg.write_or_check(pictures(), parser.parse_args().check)


def pictures() -> dict[Path, str]:
    """Return each file and what belongs into it."""
    return {path: draw(svg.THEMES[theme]) for theme, path in PICTURES.items()}


def draw(theme: Mapping[str, str]) -> str:
    body = [
        svg.text(LEFT, 32, TITLE, size=17, bold=True),
        *client(),
        *vllm(),
        *service(),
        *connections(),
        *others(),
        svg.rect(LEFT, HEIGHT - 52, svg.WIDTH - 2 * LEFT, 38, "sheet", radius=6),
        svg.text(svg.WIDTH / 2, HEIGHT - 28, PROMISE, "good", size=16, bold=True, anchor="middle"),
    ]
    return svg.document(f"{TITLE}. {PROMISE}", HEIGHT, [HEADS, *body], theme, _OWN.format(**theme))


def client() -> Iterator[str]:
    """Whoever asks vLLM, and needs no change."""
    yield svg.rect(LEFT, 52, LEFT_WIDTH, 40, "sheet edge", radius=6)
    yield svg.text(LEFT + LEFT_WIDTH / 2, 77, "your OpenAI client", size=15, anchor="middle")
    yield arrow(f"M{LEFT + LEFT_WIDTH / 2:g} 92V{TOP - 2}", both=True)
    yield svg.text(LEFT + LEFT_WIDTH / 2 + 12, 116, "HTTP, unchanged", "dim")


def vllm() -> Iterator[str]:
    """The process of stock vLLM, with what we add to it."""
    yield svg.rect(LEFT, TOP, LEFT_WIDTH, BOTTOM - TOP, "sheet edge", radius=6)
    yield svg.text(LEFT + 14, TOP + 26, "vLLM process, stock", size=16, bold=True)
    yield from part(TOP + 38, "scheduler, sampler", "paper edge", "ink")
    yield from part(TOP + 92, "target model", "target", "paper")
    yield from part(TOP + 146, "SpecBranch plugin", "paper own", "ink")


def part(y: float, words: str, fill: str, ink: str) -> Iterator[str]:
    yield svg.rect(LEFT + 14, y, LEFT_WIDTH - 28, 40, fill, radius=5)
    yield svg.text(LEFT + LEFT_WIDTH / 2, y + 25, words, ink, size=15, anchor="middle")


def service() -> Iterator[str]:
    """The draft service: its model, and a tree of what may come next."""
    yield svg.text(RIGHT + RIGHT_WIDTH / 2, 100, "on spare CPU cores, a second GPU", "dim", anchor="middle")
    yield svg.text(RIGHT + RIGHT_WIDTH / 2, 119, "or another host", "dim", anchor="middle")
    yield svg.rect(RIGHT, TOP, RIGHT_WIDTH, BOTTOM - TOP, "sheet own", radius=6)
    yield svg.text(RIGHT + 14, TOP + 26, "SpecBranch draft service", size=16, bold=True)
    yield svg.rect(RIGHT + 14, TOP + 38, RIGHT_WIDTH - 28, 40, "draft", radius=5)
    yield svg.text(RIGHT + RIGHT_WIDTH / 2, TOP + 63, "draft model (torch or llama.cpp)", "on-draft", anchor="middle")
    yield svg.rect(RIGHT + 14, TOP + 88, RIGHT_WIDTH - 28, 108, "paper edge", radius=5)
    yield svg.text(RIGHT + 26, TOP + 109, "tree of prepared continuations", size=14)
    yield from tree(RIGHT + 42, TOP + 142)
    yield svg.text(RIGHT + 26, TOP + 185, "blue: being verified now", "dim", size=13)


def tree(x: float, y: float) -> Iterator[str]:
    """The text so far, the draft that is being verified, and branches behind its possible results."""
    step, rise = 35, 17
    chain = [(x + step * place, y) for place in range(4)]
    branches = [
        [chain[1], (x + 2 * step, y - rise), (x + 3 * step, y - rise), (x + 4 * step, y - rise)],
        [chain[2], (x + 3 * step, y + rise), (x + 4 * step, y + rise), (x + 5 * step, y + rise)],
        [chain[3], (x + 4 * step, y), (x + 5 * step, y), (x + 6 * step, y)],
    ]
    for path in (chain, *branches):
        name, width = ("target", 3.0) if path is chain else ("draft", 2.0)
        yield svg.line("M" + "L".join(f"{at:g} {height:g}" for at, height in path), name, width=width)
    for path in branches:
        for at, height in path[1:]:
            yield f'<circle cx="{at:g}" cy="{height:g}" r="5" class="draft"/>'
    for at, height in chain:
        yield f'<circle cx="{at:g}" cy="{height:g}" r="5" class="target"/>'


def connections() -> Iterator[str]:
    """What goes over the socket."""
    left, right, y = LEFT + LEFT_WIDTH, RIGHT, TOP + 166
    yield svg.text(MIDDLE, y - 70, "socket: ipc,", "dim", anchor="middle")
    yield svg.text(MIDDLE, y - 52, "or TCP with keys", "dim", anchor="middle")
    yield svg.text(MIDDLE, y - 20, "accepted tokens", anchor="middle")
    yield arrow(f"M{left} {y - 10}H{right - 4}")
    yield arrow(f"M{right} {y + 8}H{left + 4}")
    yield svg.text(MIDDLE, y + 28, "next draft", anchor="middle")


def others() -> Iterator[str]:
    """More clients of the same service."""
    y = BOTTOM + 16
    yield svg.rect(LEFT, y, LEFT_WIDTH, 40, "paper dashed", radius=6)
    yield svg.text(LEFT + LEFT_WIDTH / 2, y + 25, "more vLLM processes", size=15, anchor="middle")
    yield arrow(f"M{LEFT + LEFT_WIDTH} {y + 20}H{RIGHT + 40}V{BOTTOM + 4}", both=True, name="plain", dashed=True)
    yield svg.text(RIGHT + 54, y + 25, "may share the service", "dim")


def arrow(path: str, *, both: bool = False, name: str = "ink", dashed: bool = False) -> str:
    """A line along a path, with a head at its end, or at both."""
    heads = f' marker-end="url(#{name})"' + (f' marker-start="url(#{name})"' if both else "")
    return svg.line(path, name, extra=heads + (' stroke-dasharray="5 4"' if dashed else ""))


if __name__ == "__main__":
    main()
