"""The docs: links lead somewhere, numbers have a source, words are those of the glossary, and pages are few."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbranch.core.calibration import Calibration
from specbranch.core.node import RejectionPicker
from specbranch.core.round import Round
from specbranch.core.tree import Tree
from specbranch.extensions import TORCH_CPU_INDEX
from specbranch.machine import commit_note
from tests.root import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
INTERNALS = sorted((ROOT / "docs" / "dev").glob("*.md"))
STUDIES = sorted((ROOT / "studies").glob("*/README.md"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "ROADMAP.md", "SECURITY.md")),
    *(CHANGELOG, *DOCS, *INTERNALS, *STUDIES, *EXAMPLES, ROOT / "deploy" / "README.md"),
]
MODULES = sorted((ROOT / "src").rglob("*.py"))
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
    "studies/02-budget/check.json",
    "studies/02-budget/replay.json",
}
MAX_PAGES = 16  # the home page included; words are not counted: a cap on them cost sentences their verbs
USER_PAGES = [ROOT / "README.md", CHANGELOG, *DOCS]
# Words that mean something to us only, and what pages for users say instead.
OWN_WORDS = {
    "verdict": "verification result",
    "outcome": "result, branch",
    "foreseen": "prepared",
    "bare": "without drafts",
    "pays?": "helps, is worth it",
    "price": "cost of verification",
    "flagship": "the names of the models",
    "planted": "added to the tree",
    "outlook": "prediction",
    "aside": "excluded, without drafts",
    "told": "sent",
    "grounds": "sources of lookup drafts",
    "clean commit": "",
    "over it": "relative to",
    "at once": "concurrently, immediately",
}
_OWN = re.compile(rf"\b({'|'.join(OWN_WORDS)})(?=s?\b)", re.IGNORECASE)
# Words of our own for which the field has others: distribution, expensive, workaround.
BANNED = re.compile(r"\b(laws?|dear|mend)\b", re.IGNORECASE)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_FOLDERS = ("benchmarks", "deploy", "docs", "examples", "scripts", "src", "studies", "tests", "traces")
_FILES = {name for folder in _FOLDERS for name in (ROOT / folder).rglob("*")} | set(ROOT.iterdir())
_KNOWN = {f"/{path.relative_to(ROOT)}" for path in _FILES}
_NAMED = re.compile(
    r"(?<![\w./:$~*-])("
    r"(?:[\w.-]+/)*[\w-]+(?:\.\w+)*\.(?:py|md|toml|jsonl?|png|svg|tar|gz)"  # a file
    rf"|(?:{'|'.join(_FOLDERS)})(?:/[\w.-]+)+"  # what lies in a folder of ours
    r"|(?:[a-z_]+/)+(?=[\s`])"  # a folder
    r")(?![\w/*])"
)
# Files and folders that readers make or bring themselves.
_THEIRS = re.compile(
    r"(mine|more|tickets|chat|humaneval|gsm8k|spec_bench)\.jsonl(\.gz)?|run\.(json|png)|(report|gpu-proof)\.md|card\.json"
    r"|(config|tokenizer)\.json|hrad/scores\.json|build/sbom\.json|keys/(clients/)?|.*[A-Z]{3,}\.(md|toml|json)"
)
_UNCLEAN = "benchmarks.md#result-files-without-a-clean-commit"
_OLD_RESULTS = "4739ee1"  # the commit where docs/dev/log.md finds files that were deleted since


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> list[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]


def missing_files(text: str, folder: Path) -> list[str]:
    """Files and folders named in a text that the repository lacks; a name may leave out where it begins."""
    return [
        found
        for found in _NAMED.findall(re.sub(r"https?://\S+", "", text))
        if not _THEIRS.fullmatch(found)
        and not (folder / found).exists()
        and not any(known.endswith(f"/{found.rstrip('/')}") for known in _KNOWN)
    ]


def broken_links(text: str, page: Path) -> list[str]:
    """Links of a text in place of a page that lead to no file or to no heading."""
    broken = []
    for link in _LINK.findall(text):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (heading and heading not in anchors(target.read_text() if file else text)):
            broken.append(link)
    return broken


def own_words(text: str) -> list[str]:
    """Words of our own in the prose of a page: code, the targets of links and generated parts do not count."""
    text = re.sub(r"^```.*?^```|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", "", text)
    return [match[1] for match in _OWN.finditer(text)]


def docstrings(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def provenance_of(path: Path) -> dict[str, str] | None:
    text = path.read_text()
    first = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    found: dict[str, str] | None = first.get("provenance")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    assert broken_links(page.read_text(), page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "log.md":
        text = re.sub(r"`[\w.-]+`(?=[^)]* in git)", "", text)

    assert missing_files(text, page.parent) == []


def test_every_file_that_a_docstring_names_exists() -> None:
    missing = {name(module): missing_files("\n".join(docstrings(module)), module.parent) for module in MODULES}

    assert {module: files for module, files in missing.items() if files} == {}


def test_every_deleted_file_of_the_log_is_in_git() -> None:
    command = ["git", "-C", str(ROOT), "ls-tree", "--name-only", _OLD_RESULTS, "results/"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this checkout does not reach back to {_OLD_RESULTS}")
    text = (ROOT / "docs" / "dev" / "log.md").read_text()
    named = {file for part in re.findall(r"\(([^()]*) in git", text) for file in re.findall(r"`([\w.-]+)`", part)}

    assert len(named) > 5
    assert {f"results/{file}" for file in named} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != CHANGELOG], ids=name
)  # every version has its "Added"
def test_no_page_has_two_headings_with_the_same_link(page: Path) -> None:
    found = anchors(page.read_text())

    assert len(found) == len(set(found)), page


def test_the_map_of_the_package_is_what_ls_shows() -> None:
    source = ROOT / "src" / "specbranch"
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("    src/specbranch/\n")[2].partition("\n\n")[0]
    shown = {line.split()[0] for line in text.splitlines()}
    there = {f"{path.name}/" if path.is_dir() else path.name for path in source.iterdir()}

    assert shown == there - {"__init__.py", "__main__.py", "__pycache__/", "py.typed"}


def test_the_map_of_the_architecture_has_every_module() -> None:
    source = ROOT / "src" / "specbranch"
    text = (
        (ROOT / "docs" / "dev" / "architecture.md")
        .read_text()
        .partition("    src/specbranch/\n")[2]
        .partition("\n    benchmarks/")[0]
    )
    missing = {
        path.name
        for path in source.rglob("*.py")
        if not path.name.startswith("__") and not re.search(rf"\b{path.stem}\b", text)
    }

    assert missing == {"baselines.py", "budget.py", "predictors.py", "ssd.py"}  # one a method


def test_a_dead_reference_would_be_noticed() -> None:
    page = ROOT / "docs" / "dev" / "log.md"
    text = """# One

`tests/plugins/test_endpoint.py`, `tests/vllm/test_endpoint.py`, results/crowded_cache.json, studies/99-none,
`extension/` and `plannings/`, `core/tree.py`, `core/bush.py`,
[here](#one), [there](#two), [page](nowhere.md), [log](log.md#nothing)

```toml
# Two
```
"""
    dead = [
        "tests/plugins/test_endpoint.py",
        "results/crowded_cache.json",
        "studies/99-none",
        "plannings/",
        "core/bush.py",
    ]

    assert missing_files(text, page.parent) == [*dead, "nowhere.md"]
    assert broken_links(text, page) == ["#two", "nowhere.md", "log.md#nothing"]
    assert anchors("# The same, twice\n\n## The same twice\n") == ["the-same-twice"] * 2


@pytest.mark.parametrize("path", RESULTS, ids=name)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    assert (provenance_of(path) is not None) != (name(path) in WITHOUT_PROVENANCE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_marks_a_result_without_a_clean_commit_where_it_names_it(page: Path) -> None:
    unclean = {path for path in RESULTS if commit_note(provenance_of(path) or {})}
    assert unclean
    named, marked = set(), set()
    for paragraph in re.split(r"\n\n|\n(?=- )", page.read_text()):
        files = {(page.parent / link).resolve() for link in _LINK.findall(paragraph)} & unclean
        named |= files
        if _UNCLEAN in paragraph or page.name == "benchmarks.md":  # that page is generated, and has its own tests
            marked |= files

    assert named - marked == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert BANNED.findall(page.read_text()) == []


@pytest.mark.parametrize("page", USER_PAGES, ids=name)
def test_pages_for_users_have_no_words_of_our_own(page: Path) -> None:
    assert own_words(page.read_text()) == []


def test_a_word_of_our_own_is_found_in_prose_and_not_in_code() -> None:
    text = "A *verdict*, `verdict`, [a price](price.md), bareness\n\n    bare\n\n```console\noutcome\n```\nPays. paying"

    assert own_words(text) == ["verdict", "price", "Pays"]


def test_there_are_few_pages() -> None:
    assert len(DOCS) <= MAX_PAGES


def test_every_page_is_in_the_navigation_once() -> None:
    sections = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [
        path
        for section in sections
        for part in section.values()
        for path in ([part] if isinstance(part, str) else [path for entry in part for path in entry.values()])
    ]

    assert sorted(pages) == sorted([*(f"docs/{page.name}" for page in DOCS if page.name != "index.md"), "index.md"])


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_a_page_begins_with_a_paragraph_in_full_sentences(page: Path) -> None:
    title, first, *_ = page.read_text().split("\n\n", 2)

    assert title.startswith("# ")
    assert len(first.split()) >= 15 and first.rstrip().endswith((".", ":")), first


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


def test_the_readmes_command_is_word_for_word_the_one_that_was_run_and_printed_its_figure() -> None:
    kept = json.loads((ROOT / "benchmarks" / "readme.json").read_text())
    words = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))["command"]()
    quoted = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if "tokens/s, with drafts" in line]

    assert words == kept["command"]
    assert len(quoted) == 1 and quoted[0] in kept["lines"]
    assert not kept["provenance"]["commit"].endswith("+")


def test_the_readmes_bars_and_sentences_on_equal_hardware_are_those_of_their_result_files() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "equal.py"))

    assert (ROOT / "docs" / "img" / "equal.svg").read_text() == script["picture"](), "run benchmarks/equal.py draw"
    assert script["words"]() in (ROOT / "README.md").read_text(), "put what benchmarks/equal.py words prints there"


def test_the_table_of_step_costs_is_that_of_its_result_file() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "step_cost.py"), "--table"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)

    assert made.stdout in (ROOT / "docs" / "dev" / "gpu.md").read_text(), (
        "put what benchmarks/step_cost.py --table prints there"
    )


def test_the_moving_picture_is_that_of_the_kept_run() -> None:
    draw = runpy.run_path(str(ROOT / "benchmarks" / "recording.py"))["draw"]
    kept = json.loads((ROOT / "benchmarks" / "readme.json").read_text())

    assert (ROOT / "docs" / "img" / "generate.svg").read_text() == draw(kept)


def test_there_is_one_install_command_for_cuda_and_one_for_cpus() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "install-check"))
    blocks: dict[str, list[str]] = script["blocks"]()

    assert list(blocks) == ["vllm", "cpu"]
    assert script["extras"](blocks["vllm"]) == "[vllm,torch]"
    assert script["extras"](blocks["cpu"]) == "[cpu]"
    assert blocks["cpu"][-2:] == ["--extra-index-url", TORCH_CPU_INDEX]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_extra_that_a_page_names_exists_and_none_is_for_both_kinds_of_vllm(page: Path) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for found in re.findall(r"(?:specbranch|'\.)\[([a-z,]+)\]", page.read_text()):
        extras = set(found.split(","))

        assert extras <= known.keys(), found
        assert not {"vllm", "cpu"} <= extras, found


def test_every_name_that_a_planner_may_use_exists() -> None:
    tree = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 1, Calibration()))
    names = {"round": {*dir(Round), *Round.__annotations__}, "tree": {*dir(tree)}, "node": {*dir(tree.root)}}
    named = re.findall(r"`(round|tree|node)\.(\w+)", (ROOT / "docs" / "extend.md").read_text())

    assert len(named) > 12
    assert [f"{owner}.{name}" for owner, name in named if name not in names[owner]] == []


@pytest.mark.parametrize("script", ["scripts/planners.py", "studies/10-paper/page.py", "studies/12-families/run.py"])
def test_a_page_that_a_script_makes_is_as_the_script_makes_it(script: str) -> None:
    """Planners from their settings; the page about the paper, and the families of models, from their result files."""
    subprocess.run([sys.executable, ROOT / script, "--check"], check=True)
