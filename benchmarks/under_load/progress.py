"""The file of what a long run has done: a header, then one JSON line for each thing. Started again, a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Progress:
    """Lines that are here already, and new ones. A file with another header is of another run, and refused."""

    def __init__(self, path: Path, header: Line) -> None:
        self.lines: list[Line] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        header = {"what": "header", **json.loads(json.dumps(header))}
        if self.lines and self.lines[0] != header:
            raise SystemExit(
                f"{path} is of another run (commit, seed, models or sizes); delete it, or name another --out"
            )
        self._path = path
        if not self.lines:
            self.add(header)

    def add(self, line: Line) -> None:
        """Keep a line, on disk at once."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, what: str, **fields: Any) -> list[Line]:
        """The lines of one sort with these values."""
        wanted = {"what": what, **fields}
        return [line for line in self.lines if all(line.get(key) == value for key, value in wanted.items())]
