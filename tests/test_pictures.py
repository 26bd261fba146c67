"""The pictures of the docs: each has a title, can be read at the width of a README, and is what its script draws."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.drawing import svg
from tests.root import ROOT

FOLDER = ROOT / "docs" / "img"
PICTURES = sorted(FOLDER.glob("*.svg"))
CHECKS = {
    "architecture-light.svg": ("scripts/architecture.py", "--check"),
    "architecture-dark.svg": ("scripts/architecture.py", "--check"),
    "timeline-light.svg": ("benchmarks/timeline.py", "--check"),
    "timeline-dark.svg": ("benchmarks/timeline.py", "--check"),
    "gate-trace.svg": ("benchmarks/gate_trace.py", "--check"),
    "generate.svg": ("benchmarks/recording.py", "--check"),
    "equal.svg": ("benchmarks/equal.py", "check"),
}
_SVG = "{http://www.w3.org/2000/svg}"
_LETTER = {"normal": 0.56, "bold": 0.62}  # width over font size, in a wide font
_MAX_REPLAY = 150_000  # bytes


def name(path: Path) -> str:
    return path.name


def width_of(root: ElementTree.Element) -> float:
    return float(root.attrib["viewBox"].split()[2])


def texts(
    element: ElementTree.Element, size: float = 16.0, weight: str = "normal", anchor: str = "start"
) -> Iterator[tuple[ElementTree.Element, float, str, str]]:
    """Every text with its font size, weight and anchor, which it may have from what it stands in."""
    size = float(element.get("font-size", size))
    weight, anchor = element.get("font-weight", weight), element.get("text-anchor", anchor)
    if element.tag == f"{_SVG}text":
        yield element, size, weight, anchor
    for inner in element:
        yield from texts(inner, size, weight, anchor)


def contrast(one: str, other: str) -> float:
    """The contrast of two colors, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_a_picture_has_a_title_for_those_who_cannot_see_it(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()

    assert root[0].tag == f"{_SVG}title"
    assert len((root[0].text or "").split()) > 5
    assert root.get("role") == "img"


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_no_text_is_smaller_than_12_pixels_at_the_width_of_a_readme(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    scale = 700 / width_of(root)
    sizes = [size * scale for _, size, *_ in texts(root)]

    assert len(sizes) > 5
    assert min(sizes) >= 12
    assert "font-size:" not in picture.read_text(), "sizes are attributes, where this test finds them"
    assert "scale(" not in picture.read_text()


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_no_text_runs_out_of_its_picture(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    for element, size, weight, anchor in texts(root):
        words, at = element.text or "", float(element.attrib["x"])
        width = float(element.get("textLength", len(words) * size * _LETTER[weight]))
        start = at - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]

        assert start >= 0 and start + width <= width_of(root), words


@pytest.mark.parametrize("theme", svg.THEMES)
def test_text_has_contrast_on_all_that_it_stands_on(theme: str) -> None:
    colors = svg.THEMES[theme]
    pairs = [*product(("ink", "dim", "good", "bad"), ("paper", "sheet")), ("paper", "target"), ("on-draft", "draft")]

    found = {pair: contrast(*(colors[one] for one in pair)) for pair in pairs}

    assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_text_is_in_a_color_whose_contrast_is_known(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    allowed = {"ink", "dim", "good", "bad", "paper", "on-draft"}
    for group in root.iter(f"{_SVG}g"):
        for element in group:
            element.set("class", f"{group.get('class', '')} {element.get('class', '')}")

    assert [element.text for element, *_ in texts(root) if not allowed & set(element.get("class", "").split())] == []


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_a_picture_is_either_for_one_kind_of_page_or_follows_the_reader(picture: Path) -> None:
    """It has a background, so that it can be read even on a page of the other kind."""
    text = picture.read_text()
    light, dark = (f".paper {{ fill: {svg.THEMES[theme]['paper']} }}" in text for theme in ("light", "dark"))

    assert light or dark
    assert ("prefers-color-scheme: dark" in text) == (light and dark)
    if picture.stem.endswith(("-light", "-dark")):
        assert light == picture.stem.endswith("-light")
        assert (FOLDER / picture.name.replace("-light", "-dark")).exists()


def test_what_moves_ends_and_stands_still_for_readers_who_prefer_that() -> None:
    moving = [picture for picture in PICTURES if re.search(r"animation|<animate|<set", picture.read_text())]

    assert [picture.name for picture in moving] == ["generate.svg"]
    text = moving[0].read_text()
    assert "(prefers-reduced-motion: reduce) { .moving { animation: none } }" in text
    assert re.search(r"animation-iteration-count: \d\b", text)
    assert "infinite" not in text and "<set" not in text


def test_every_picture_has_a_script_that_draws_it() -> None:
    assert CHECKS.keys() == {picture.name for picture in PICTURES}


@pytest.mark.parametrize("command", sorted(set(CHECKS.values())), ids=lambda command: str(command[0]))
def test_the_committed_file_is_what_the_script_draws(command: tuple[str, str]) -> None:
    subprocess.run([sys.executable, ROOT / command[0], command[1]], check=True, stdout=subprocess.DEVNULL)


def test_a_file_that_is_not_what_its_script_draws_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "one.svg"
    path.write_text("old")

    with pytest.raises(SystemExit, match=r"one\.svg is not what this script draws"):
        svg.write_or_check({path: "new"}, is_check=True)
    svg.write_or_check({path: "new"}, is_check=False)
    assert path.read_text() == "new"


def test_the_replay_is_in_true_color_and_small() -> None:
    picture = (FOLDER / "replay.png").read_bytes()

    assert picture[25] in (2, 6), "a palette loses the colors that the legend names"  # the color type of the PNG
    assert len(picture) < _MAX_REPLAY


def test_machines_and_models_are_named_as_people_know_them() -> None:
    sets = ["avx2", "avx512f", "amx_tile"]
    ours = {"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "instruction_sets": sets[:2]}

    assert svg.describe_cpu(ours) == "Intel Xeon 2.5 GHz, AVX-512, no AMX"
    assert svg.describe_cpu({"cpu": "AMD EPYC 9654 CPU", "instruction_sets": sets}) == "AMD EPYC 9654, AVX-512, AMX"
    assert svg.model_name("qwen-coder-1.5b-dense") == "Qwen2.5-Coder-1.5B"
    assert svg.model_name("models/mine") == "mine"
