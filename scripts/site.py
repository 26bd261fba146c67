#!/usr/bin/env python
"""Build the docs site from the pages of this repository, into build/site. Needs `pip install '.[docs]'`.

Pages lie in the site as in the repository, so relative links hold in both. The reference of the commands is made of their
help texts, that of the Python interface of docstrings. A warning, or a link that leads nowhere, fails the build.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"  # as zensical.toml has them
PAGES = ("docs", "studies", "benchmarks", "examples", "deploy", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NO_PAGES = shutil.ignore_patterns("__pycache__", "*.pyc")
INTERFACE = (
    "specbranch.DraftServer",
    "specbranch.core.planner",
    "specbranch.engines.base",
    "specbranch.service.client.interface",
    "specbranch.core.session",
    "specbranch.simulation.simulate",
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gather()
    reference = SOURCE / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text("\n".join(commands_page()))
    (reference / "python.md").write_text("# Python\n\n" + "\n\n".join(f"::: {name}" for name in INTERFACE) + "\n")
    (SOURCE / "studies" / "README.md").write_text("\n".join(studies_page()))
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, check=True)
    broken = list(broken_links())
    if broken:
        sys.exit("links that lead nowhere:\n" + "\n".join(broken))


def gather() -> None:
    """Copy the pages, and the files that they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    shutil.copy(ROOT / "README.md", SOURCE / "index.md")
    for name in PAGES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, SOURCE / name, ignore=NO_PAGES)
        else:
            shutil.copy(ROOT / name, SOURCE / name)


def studies_page() -> Iterator[str]:
    """All studies by their questions."""
    yield "# Studies\n\nOne question each, with its answer, its figures and the script that makes them.\n"
    for page in sorted((ROOT / "studies").glob("*/README.md")):
        yield f"- [{page.read_text().splitlines()[0].lstrip('# ')}]({page.parent.name}/README.md)"


def commands_page() -> Iterator[str]:
    """Every command with its help and its options."""
    import typer

    from specbranch.cli import app

    yield "# Commands\n"
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        own = getattr(command, "commands", None)
        for full, one in {f"{name} {sub}": each for sub, each in own.items()}.items() if own else [(name, command)]:
            yield from command_section(full, one)


def command_section(name: str, command: Any) -> Iterator[str]:
    """One command."""
    yield f"## specbranch {name}\n\n{plain(command.help)}\n"
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
    """A help text for a page: one line for each paragraph."""
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
            if key in ("href", "src") and value and tag != "link":
                self.links.append(value)
            if key in ("id", "name") and value:
                self.anchors.add(value)


def broken_links() -> Iterator[str]:
    """Links of the built site whose file or anchor is not there; those to other sites are not followed."""
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


if __name__ == "__main__":
    main()
