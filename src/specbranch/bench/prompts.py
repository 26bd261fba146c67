"""Prompts of public benchmark sets, read from their own files; each is a chat of one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbranch.errors import SpecBranchError

_Row = dict[str, Any]
_CHAT = {"writing", "roleplay", "reasoning", "stem", "humanities", "extraction"}
_Task = tuple[Callable[[_Row], bool], Callable[[_Row], str]]


def _of_spec_bench(*categories: str) -> _Task:
    return lambda row: row["category"] in categories, lambda row: row["turns"][0]


def _any_rows(field: str) -> _Task:
    return lambda row: True, lambda row: str(row[field])


# task: (which rows of the file belong to it, the message of a row); of several turns the first
_TASKS: dict[str, _Task] = {
    "humaneval": (lambda row: True, lambda row: "Complete this Python function.\n\n" + row["prompt"]),
    "gsm8k": (lambda row: True, lambda row: row["question"]),
    "mt-bench": _of_spec_bench(*_CHAT, "coding", "math"),
    "translation": _of_spec_bench("translation"),
    "summarization": _of_spec_bench("summarization"),
    "qa": _of_spec_bench("qa"),
    "math": _of_spec_bench("math_reasoning"),
    "rag": _of_spec_bench("rag"),
    "chat": _of_spec_bench(*_CHAT),
}

TASKS = tuple(_TASKS)


class PromptError(SpecBranchError, ValueError):
    """A file that does not hold the expected prompts; the message says what to do."""


def read_prompts(task: str, path: Path, count: int, field: str | None = None, skip: int = 0) -> list[str]:
    """`count` messages of a task, spread evenly over its file, always the same ones.

    `field` allows any JSONL file. Left out are the `skip` messages that would be read if so many were asked for.
    """
    if field is None and task not in _TASKS:
        raise PromptError(
            f"no task is called {task!r}; choose from {', '.join(TASKS)}, or name the field that holds the prompt"
        )
    belongs, message = _TASKS[task] if field is None else _any_rows(field)
    try:
        rows = [row for line in path.read_text().splitlines() if belongs(row := json.loads(line))]
        skipped = _spread(rows, skip)
        found = [message(row) for row in _spread([row for row in rows if row not in skipped], count)]
    except OSError as error:
        raise PromptError(
            f"cannot read {path}: {error.strerror}; name an existing file (of `bench run`: in the directory --data)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(
            f"{path} does not hold prompts of {task} ({error!r}); --field names the field of another file"
        ) from error
    if len(found) < count:
        raise PromptError(f"{path} holds {len(found)} prompts of {task}, but {count} are needed; ask for fewer")
    return found


def _spread(rows: list[_Row], count: int) -> list[_Row]:
    """So many rows, with even distances between them."""
    return rows[:: max(1, len(rows) // count)][:count] if count > 0 else []
