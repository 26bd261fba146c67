"""Pictures as plain SVG: colors for light and dark pages, a few elements, and files that can be checked.

Pictures are drawn 700 pixels wide, as GitHub shows a README, so a font size here is the size that readers see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 700
MIN_FONT = 12  # pixels, at this width
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# Text is `ink`, `dim`, `good` or `bad` on `paper` or `sheet`; `target` and `draft` fill bars and are the models' colors
# (text on them is `paper` and `on-draft`).
LIGHT = {
    "paper": "#ffffff",
    "sheet": "#f1f4f7",
    "line": "#b6c0ca",
    "ink": "#1f2933",
    "dim": "#52606d",
    "good": "#0b6b4f",
    "bad": "#a8321f",
    "target": "#2f5d8a",
    "draft": "#d07a1a",
    "on-draft": "#1f2933",
    "plain": "#8794a1",
    "slow": "#faebc4",
    "wrong": "#fadbd7",
    "dead": "#dde2e7",
}
DARK = {
    "paper": "#0d1117",
    "sheet": "#1a212a",
    "line": "#4a5561",
    "ink": "#e6edf3",
    "dim": "#a3aeb9",
    "good": "#56d364",
    "bad": "#ff9d8a",
    "target": "#6ea8de",
    "draft": "#f0a04b",
    "on-draft": "#0d1117",
    "plain": "#7d8894",
    "slow": "#5a4714",
    "wrong": "#5e2b27",
    "dead": "#3a424b",
}
THEMES = {"light": LIGHT, "dark": DARK}
# What people call the models whose directories our result files name.
MODELS = {
    "qwen-coder-1.5b-dense": "Qwen2.5-Coder-1.5B",
    "qwen-coder-1.5b-int8": "Qwen2.5-Coder-1.5B (int8)",
    "qwen-coder-0.5b-dense": "Qwen2.5-Coder-0.5B",
}


def document(
    title: str, height: float, body: Iterable[str], theme: Mapping[str, str] | None = None, css: str = ""
) -> str:
    """Return a picture; without a theme it has both and follows the reader's preference.

    It has a background of its own, so that it can be read on any page. `css` is added to its style sheet.
    """
    style = _classes(theme or LIGHT)
    if theme is None:
        style += f"\n@media (prefers-color-scheme: dark) {{\n{_classes(DARK)}\n}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
            f' role="img" font-family="{SANS}" font-size="14">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<style>\n{style}{css}\n</style>",
            rect(0.5, 0.5, WIDTH - 1, height - 1, "paper edge", radius=8),
            *body,
            "</svg>\n",
        ]
    )


def _classes(theme: Mapping[str, str]) -> str:
    fills = " ".join(f".{name} {{ fill: {color} }}" for name, color in theme.items())
    strokes = " ".join(f".{name}-line {{ stroke: {color}; fill: none }}" for name, color in theme.items())
    return f"{fills}\n{strokes}\n.edge {{ stroke: {theme['line']} }}"


def text(
    x: float, y: float, words: str, name: str = "ink", *, size: float = 14, bold: bool = False, anchor: str = ""
) -> str:
    """One line of text in the color `name`; `anchor` is where `x` is: at its start, `middle` or `end`."""
    if size < MIN_FONT:
        raise ValueError(f"{words!r} is too small to read: {size} px")
    extra = (' font-weight="bold"' if bold else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}" class="{name}" font-size="{size:g}"{extra}>{escape(words, quote=False)}</text>'


def rect(x: float, y: float, width: float, height: float, name: str, *, radius: float = 0, extra: str = "") -> str:
    """A rectangle in the color `name`."""
    corner = f' rx="{radius:g}"' if radius else ""
    place = f'x="{round(x, 1):g}" y="{round(y, 1):g}" width="{round(width, 1):g}" height="{round(height, 1):g}"'
    return f'<rect {place} class="{name}"{corner}{extra}/>'


def line(path: str, name: str = "ink", *, width: float = 1.5, extra: str = "") -> str:
    """A line along an SVG path, in the color `name`."""
    return f'<path d="{path}" class="{name}-line" stroke-width="{width:g}"{extra}/>'


def write_or_check(pictures: Mapping[Path, str], is_check: bool) -> None:
    """Write each picture to its file; or only check that the files are what they should be, and exit if one is not."""
    stale = [path for path, drawn in pictures.items() if not path.exists() or path.read_text() != drawn]
    if is_check:
        sys.exit("\n".join(f"{path.name} is not what this script draws" for path in stale) or 0)
    for path in stale:
        path.write_text(pictures[path])
    print(*(f"{path.name}: {len(drawn)} bytes" for path, drawn in pictures.items()), sep="\n")


def model_name(directory: str) -> str:
    """Return what people call a model whose directory a result file names."""
    return MODELS.get(directory, directory.rstrip("/").rpartition("/")[2])


def number(count: int) -> str:
    """Return a small number as a word."""
    return {1: "one", 2: "two", 3: "three", 4: "four"}.get(count, str(count))


def describe_cpu(provenance: Mapping[str, Any]) -> str:
    """Return what a result file says of its processor, such as "Intel Xeon 2.5 GHz, AVX-512, no AMX"."""
    name = re.sub(r"\((R|TM)\)| Processor| CPU", "", str(provenance["cpu"]))
    clocked = re.fullmatch(r"(.+) @ ([\d.]+)GHz", name)
    if clocked:
        name = f"{clocked[1].strip()} {float(clocked[2]):g} GHz"
    sets = provenance["instruction_sets"]
    vectors = "AVX-512" if "avx512f" in sets else "no AVX-512"
    matrices = "AMX" if any(one.startswith("amx") for one in sets) else "no AMX"
    return f"{name}, {vectors}, {matrices}"
