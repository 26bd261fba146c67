"""A target engine in a process of its own, driven line by line: one JSON order in, one JSON answer out.

The runner knows no engine; it knows the module that speaks this protocol for it. While one worker answers the others
sleep, so several engines can share the same cores and be measured in turns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

VLLM = "specbranch.plugins.vllm.worker"
_STOP_S = 30.0
_LAST_WORDS_S, _LOG_LEN = 5.0, 1500


class WorkerError(RuntimeError):
    """A worker that ended or said something else than an answer."""


def step_gaps_s(requests: Sequence[Mapping[str, Any]], skip: int = 0) -> list[float]:
    """Times between the steps of a worker's answers, all but the first `skip` steps of each."""
    return [end - start for request in requests for (start, _), (end, _) in pairwise(request["steps"][skip:])]


class Worker:
    """A running worker; a context manager that starts and stops it."""

    def __init__(self, module: str, options: dict[str, Any], log_file: Path) -> None:
        self._module = module
        self._options = options
        self._log_file = log_file
        self._process: subprocess.Popen[str] | None = None
        self.info: dict[str, Any] = {}

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
            end = self._log_file.read_text(errors="replace")[-_LOG_LEN:]
            raise WorkerError(f"{self._module} ended or failed; the end of its log:\n{end}") from error
        return answer

    def generate(
        self, messages: Sequence[str], sampling: dict[str, Any], section: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Answer these messages together."""
        return self.ask({"messages": list(messages), "sampling": sampling, "use": section})

    def __enter__(self) -> Worker:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self.info = self.ask(self._options)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
