#!/usr/bin/env python3
"""Check the shape of the source: sizes of files, classes and functions, names that mean two things, circles of imports.

Prints what it finds and fails at the limits. `scripts/check` runs it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "specbranch"
MAX_FILES, MAX_IN_FOLDER, MAX_LINES, MAX_TRACKED = 160, 15, 500, 640
MAX_METHODS, MAX_ATTRIBUTES, MAX_FUNCTION = 20, 15, 50  # attributes that methods set; lines of a function
COMMANDS = SOURCE / "cli" / "commands"  # a command is named after what it runs
NO_NAMES = ("__init__", "__main__")


def main() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    lengths = {path: path.read_text().count("\n") for path in files}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    sizes = [*_sizes(lengths, tracked.count("\n")), *_large_definitions(trees)]
    faults = [*sizes, *_two_meanings(trees), *_circles(_imports(trees))]
    print(f"{len(files)} source files, {sum(lengths.values())} lines, {tracked.count(chr(10))} tracked files")
    sys.exit("\n".join(faults) if faults else 0)


def _sizes(lengths: Mapping[Path, int], num_tracked: int) -> Iterator[str]:
    if len(lengths) > MAX_FILES:
        yield f"{len(lengths)} source files; {MAX_FILES} at most"
    if num_tracked >= MAX_TRACKED:
        yield f"{num_tracked} tracked files; fewer than {MAX_TRACKED}"
    for path, length in lengths.items():
        if length > MAX_LINES:
            yield f"{_shown(path)} has {length} lines; {MAX_LINES} at most"
    folders = defaultdict(list)
    for path in lengths:
        folders[path.parent].append(path)
    for folder, inside in folders.items():
        if len(inside) > MAX_IN_FOLDER:
            yield f"{_shown(folder)} has {len(inside)} files; {MAX_IN_FOLDER} at most"


def _large_definitions(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Classes and functions over the limits; a command may be as long as its options are many."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                attributes = {
                    target.attr
                    for method in methods
                    for target in ast.walk(method)
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                    if isinstance(target.value, ast.Name) and target.value.id == "self"
                }
                for kind, count, limit in (
                    ("methods", len(methods), MAX_METHODS),
                    ("attributes", len(attributes), MAX_ATTRIBUTES),
                ):
                    if count > limit:
                        yield f"{_shown(path)}: {node.name} has {count} {kind}; {limit} at most"
            elif isinstance(node, ast.FunctionDef) and path.parent != COMMANDS:
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    yield f"{_shown(path)}: {node.name} has {length} lines; {MAX_FUNCTION} at most"


def _two_meanings(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Modules, and public classes, that share a name."""
    modules, classes = defaultdict(list), defaultdict(list)
    for path, tree in trees.items():
        if path.stem not in NO_NAMES and path.parent != COMMANDS:
            modules[path.stem].append(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
    for kind, names in (("modules", modules), ("classes", classes)):
        for name, paths in names.items():
            if len(paths) > 1:
                yield f"several {kind} are called {name}: {', '.join(map(_shown, paths))}"


def _imports(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """By module, the modules of this package that it imports, wherever in the file."""
    names = {_module(path): path for path in trees}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        here = found.setdefault(_module(path), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                here |= inner or ({node.module} & names.keys())
    return found


def _circles(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Modules that import themselves by way of others, each circle once."""
    seen: set[str] = set()
    for start in imports:
        way, stack = {start: ""}, [start]
        while stack:
            here = stack.pop()
            for there in imports[here]:
                if there == start and here not in seen and start not in seen:
                    names = [start]
                    while here:
                        names.append(here)
                        here = way[here]
                    seen.update(names)
                    yield "a circle of imports: " + " -> ".join(reversed(names))
                    break
                if there not in way:
                    way[there] = here
                    stack.append(there)


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


if __name__ == "__main__":
    main()
