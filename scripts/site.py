#!/usr/bin/env python
"""Build the docs site from the pages of this repository, into build/site. Needs `pip install '.[docs]'`.

Pages lie in the site as in the repository, so relative links hold in both. The reference of the commands is made of their
help texts, that of the Python interface of docstrings. A warning, a link that leads nowhere, or a word that the search
should find and does not, fails the build.

The site's address and the links to the repository come from the variables that GitHub's workflows have; elsewhere the site is
built for http://127.0.0.1:8000/ and has no such links.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
CONFIG = ROOT / "zensical.toml"
PAGES = (
    *("docs", "studies", "benchmarks", "examples", "deploy"),
    *("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "ROADMAP.md", "SECURITY.md"),
)
NO_PAGES = shutil.ignore_patterns("__pycache__", "*.pyc")
LOCAL = "http://127.0.0.1:8000/"
# What the reference shows, with what it leaves out of each: only what users call.
INTERFACE: Mapping[str, tuple[str, ...]] = {
    "specbranch.DraftServer": ("vllm_args", "transformers_args", "at", "start", "stop"),
    "specbranch.simulate": (),
    "specbranch.Trace": (),
    "specbranch.Method": (),
    "specbranch.Layout": (),
    "specbranch.make_trace": (),
    "specbranch.Planner": ("submit", "rows_to_run", "learn"),
    "specbranch.Settings": (),
    "specbranch.Predictor": (),
    "specbranch.DraftEngine": (),
    "specbranch.register_planner": (),
    "specbranch.register_predictor": (),
    "specbranch.register_engine": (),
    "specbranch.SpecBranchError": (),
}
SEARCHED = ("disable", "acceptance rate", "out of memory")  # words that readers look for


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gather()
    zensical = Path(sys.executable).with_name("zensical")
    config = CONFIG.with_name(".zensical-site.toml")  # paths in it are relative to its folder
    config.write_text(configuration(os.environ))
    try:
        subprocess.run([zensical, "build", "--clean", "--strict", "-f", config.name], cwd=ROOT, check=True)
    finally:
        config.unlink()
    if broken := list(broken_links()):
        sys.exit("links that lead nowhere:\n" + "\n".join(broken))
    if missing := [words for words in SEARCHED if words not in searchable()]:
        sys.exit(f"the search does not find {', '.join(missing)}")


def configuration(environment: Mapping[str, str]) -> str:
    """Return the configuration of the site, with the addresses of the site and of the repository where they are known."""
    repository = environment.get("GITHUB_REPOSITORY")
    if not repository:
        return CONFIG.read_text().replace("[project]\n", f'[project]\nsite_url = "{LOCAL}"\n', 1)
    owner, _, name = repository.partition("/")
    address = f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    known = {
        "site_url": f"https://{owner.lower()}.github.io/{name}/",
        "repo_url": address,
        "repo_name": repository,
        "edit_uri": "edit/main/",
    }
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in known.items())
    text = CONFIG.read_text().replace("[project]\n", f"[project]\n{lines}", 1)
    return text.replace("features = [\n", 'features = [\n  "content.action.edit",\n', 1)


def gather() -> None:
    """Copy the pages and the files that they link to; add what is generated."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for name in PAGES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, SOURCE / name, ignore=NO_PAGES)
        else:
            shutil.copy(ROOT / name, SOURCE / name)
    home = SOURCE / "docs" / "index.md"
    (SOURCE / "index.md").write_text(moved_up(home.read_text()))
    home.unlink()
    _append(SOURCE / "docs" / "reference.md", "\n".join(commands()))
    _append(SOURCE / "docs" / "python.md", "## Signatures\n\n" + "\n\n".join(interface()))
    (SOURCE / "studies" / "README.md").write_text("\n".join(studies_page()))


def _append(page: Path, text: str) -> None:
    page.write_text(f"{page.read_text()}\n{text}\n")


def moved_up(text: str) -> str:
    """Return a page of docs/ with its links as they are one folder higher."""

    def higher(match: re.Match[str]) -> str:
        before, link = match.groups()
        return before + (link.removeprefix("../") if link.startswith("../") else f"docs/{link}")

    return re.sub(r'(\]\(|src="|srcset="|href=")(?![a-z]+:|#)([^)\s"]+)', higher, text)


def interface() -> Iterator[str]:
    """Yield the directives that show each public name with its signature."""
    for name, members in INTERFACE.items():
        shown = f"[{', '.join(members)}]" if members else "false"
        yield (
            f"::: {name}\n    options:\n      heading_level: 3\n      inherited_members: true\n      members: {shown}\n"
            "      merge_init_into_class: true"
        )


def studies_page() -> Iterator[str]:
    """Yield the lines of the page of studies: each with its question."""
    yield "# Studies\n\nEach study asks one question and gives its answer, its figures and the script that makes them.\n"
    for page in sorted((ROOT / "studies").glob("*/README.md")):
        yield f"- [{page.read_text().splitlines()[0].lstrip('# ')}]({page.parent.name}/README.md)"


def commands() -> Iterator[str]:
    """Yield the section of the commands: each with its help and its options."""
    import typer

    from specbranch.cli import app

    yield "## Commands\n"
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        own = getattr(command, "commands", None)
        for full, one in {f"{name} {sub}": each for sub, each in own.items()}.items() if own else [(name, command)]:
            yield from command_section(full, one)


def command_section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of one command."""
    yield f"### specbranch {name}\n\n{plain(command.help)}\n"
    yield "| option | meaning | default |\n|---|---|---|"
    for param in command.params:
        if getattr(param, "hidden", False) or param.name == "help":
            continue
        names = param.metavar or param.name.upper() if param.param_type_name == "argument" else ", ".join(param.opts)
        default = param.default if isinstance(param.default, str | int | float) and param.default is not False else ""
        yield f"| `{names}` | {plain(getattr(param, 'help', None))} | {default} |"
    epilog = plain(command.epilog)
    yield f"\n{epilog}\n" if epilog else ""


def plain(text: str | None) -> str:
    """Return a help text for a page: one line for each paragraph."""
    text = re.sub(r"\[/?[a-z ]+\]", "", text or "").replace("\b", "").replace("|", "\\|")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src", "srcset") and value and tag != "link":
                self.links.append(value)
            if key in ("id", "name") and value:
                self.anchors.add(value)


def broken_links() -> Iterator[str]:
    """Yield the links of the built site whose file or anchor is not there; those to other sites are not followed."""
    pages = {path: Links(path) for path in SITE.rglob("*.html")}
    for page, found in pages.items():
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or (page.name == "404.html"):
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            is_there = path.exists() and (
                not parts.fragment or path not in pages or parts.fragment in pages[path].anchors
            )
            if not is_there:
                yield f"{page.relative_to(SITE)}: {link}"


def searchable() -> str:
    """Return all text that the search of the built site knows, in lower case."""
    return " ".join(path.read_text().lower() for path in SITE.rglob("search*.json"))


if __name__ == "__main__":
    main()
