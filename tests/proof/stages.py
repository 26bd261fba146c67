"""One stage: a command in a process of its own, with a limit of time. Whatever becomes of it, the next one can run."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.launch.child import Child

Reader = Callable[[Path], dict[str, Any]]
Ending = Literal["passed", "failed", "timed out", "skipped"]
_TAIL = 30  # lines of the log of a stage that did not pass


@dataclass(frozen=True, slots=True)
class Stage:
    """A command that writes its result to the file `{out}`, or to standard output; `read` makes figures of it.

    `most_s` is the longest time that it may take.
    """

    name: str
    command: Sequence[str]
    read: Reader
    most_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended, and what it found; `why` is the end of its log if it did not pass."""

    name: str
    ending: Ending
    took_s: float = 0.0
    result: dict[str, Any] | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def carry_out(stage: Stage, directory: Path, left_s: float) -> Outcome:
    """Run a stage within its time and what is left of all. Processes that it has started end with it."""
    if left_s <= 0:
        return Outcome(stage.name, "skipped", why="no time was left")
    directory.mkdir(parents=True, exist_ok=True)
    log, out, printed = directory / "log", directory / "out", directory / "stdout"
    begin_s = time.monotonic()
    with printed.open("w") as sink:
        command = [word.replace("{out}", str(out)) for word in stage.command]
        child = Child(command, log_file=log, stdout=sink, has_group=True)
        try:
            has_ended = child.wait(min(stage.most_s, left_s))
            code = child.returncode
        finally:
            child.kill()
    took_s = round(time.monotonic() - begin_s, 1)
    try:
        result = stage.read(out if out.exists() else printed)
    except (OSError, ValueError, IndexError, ElementTree.ParseError):
        result = None
    ending: Ending = "timed out" if not has_ended else "passed" if code == 0 and result is not None else "failed"
    return Outcome(stage.name, ending, took_s, result, "" if ending == "passed" else tail(log, printed))


def tail(*logs: Path) -> str:
    """The last lines of what was said, standard error last."""
    lines = [line for log in reversed(logs) if log.exists() for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(line[:300] for line in lines[-_TAIL:])


def last_json(path: Path) -> dict[str, Any]:
    """The JSON document in the last line of a file."""
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found


def read_junit(path: Path) -> dict[str, Any]:
    """How many tests of a JUnit file passed, the names of those that did not, and what the suite noted."""
    root = ElementTree.parse(path).getroot()
    cases = list(root.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "noted": {one.get("name"): one.get("value") for one in root.iter("property")},
    }
