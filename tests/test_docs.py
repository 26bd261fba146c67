"""The docs: links lead somewhere, numbers have a source, words are those of the glossary, and there are few of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
STUDIES = sorted((ROOT / "studies").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *STUDIES]
RESULTS = sorted(
    path
    for folder in ("benchmarks", "studies")
    for ending in ("json", "jsonl")
    for path in (ROOT / folder).rglob(f"*.{ending}")
)
SCRIPTS = sorted([*(ROOT / "studies").glob("*/*.py"), *(ROOT / "benchmarks").glob("*.py")])
# Files from before result files named their source.
WITHOUT_PROVENANCE = {
    "benchmarks/lookup-latency.jsonl",
    "studies/01-weak-pair/result.json",
    "studies/02-budget/check.json",
    "studies/02-budget/replay.json",
    "studies/03-hrad/scores.json",
    "studies/05-scale/result.json",
}
MOST_WORDS = 16_000
# Words of our own for which the field has others: distribution, expensive, workaround.
BANNED = re.compile(r"\b(laws?|dear|mend)\b", re.IGNORECASE)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_RESULT = re.compile(r"`((?:benchmarks|studies)/[\w./-]+\.(?:jsonl?|toml|py|png|svg))`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page

        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_of_benchmarks_and_studies_that_a_page_names_exists(page: Path) -> None:
    missing = [file for file in _RESULT.findall(page.read_text()) if not (ROOT / file).exists()]

    assert missing == []


def test_no_page_has_two_headings_with_the_same_link() -> None:
    for page in PAGES:
        headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)

        assert len(headings) == len(set(headings)), page


@pytest.mark.parametrize("path", RESULTS, ids=name)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    text = path.read_text()
    first = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)

    assert ("provenance" in first) != (name(path) in WITHOUT_PROVENANCE)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"], ids=name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert BANNED.findall(page.read_text()) == []


def test_the_docs_can_be_read_to_the_end() -> None:
    assert sum(len(page.read_text().split()) for page in DOCS) < MOST_WORDS


def test_the_readme_has_at_most_five_hundred_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 500


def test_our_own_words_are_not_in_the_code() -> None:
    found = [
        f"{name(path)}: {word}"
        for path in (ROOT / "src").rglob("*.py")
        if path.name != "prompts.py"  # letters begin with one of them
        for word in BANNED.findall(path.read_text())
    ]

    assert found == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda page: page.parent.name)
def test_a_study_has_a_question_an_answer_a_script_and_a_result(study: Path) -> None:
    text = study.read_text()

    assert text.splitlines()[0].endswith("?")
    assert "**Answer:**" in text
    assert (study.parent / "run.py").exists()
    assert (study.parent / "result.json").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_can_be_started(script: Path) -> None:
    if re.search(r"^(import|from) (torch|transformers)", script.read_text(), re.MULTILINE):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
