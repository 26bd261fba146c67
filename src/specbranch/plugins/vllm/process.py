"""A target in a process of its own: load it, let it decode runs, stop it.

While one target decodes the others sleep, so several of them can share the same cores and be measured in turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from specbranch.child import PIPE, Child
from specbranch.errors import SpecBranchError
from specbranch.plugins.vllm.failure import FailureLog
from specbranch.plugins.vllm.messages import Done, Engine, News, Run
from specbranch.plugins.vllm.target import TargetOptions

_WORKER = "specbranch.plugins.vllm.worker"
_STOP_S = 30.0
_END_S = 5.0  # for a process that has closed its output


class TargetFailure(SpecBranchError, RuntimeError):
    """A target's process ended before its work was done; the message has the end of its log."""


class TargetProcess:
    """A context manager: vLLM is loaded when it is entered. `cores` None means those of this process."""

    engine: Engine

    def __init__(self, options: TargetOptions, log_file: Path, cores: Collection[int] | None = None) -> None:
        self._options = options
        self._log_file = log_file
        self._cores = cores or None
        self._child: Child | None = None

    def run(self, run: Run, on_finished: Callable[[int], None] | None = None) -> Done:
        """Let it do a run and wait for it; `on_finished` is told of requests that have finished."""
        self._send(run)
        while True:
            news = self._receive()
            if news.done is not None:
                return news.done
            if on_finished is not None:
                on_finished(news.num_finished)

    def __enter__(self) -> TargetProcess:
        self._child = Child(
            [sys.executable, "-m", _WORKER],
            environment=self._environment(),
            cores=self._cores,
            log_file=self._log_file,
            stdin=PIPE,
            stdout=PIPE,
            has_group=True,  # its workers
        )
        try:
            self._send(self._options)
            news = self._receive()
            assert news.engine is not None, "the first line says what was loaded"
            self.engine = news.engine
        except BaseException:
            self._child.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child is not None
        self._child.close_input()
        if kind is None:
            self._child.wait(_STOP_S)
        self._child.kill()

    def _environment(self) -> dict[str, str]:
        """As many threads as cores, unless the user wants another number."""
        if not self._cores or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(len(self._cores))}

    def _send(self, order: Any) -> None:
        assert self._child is not None, "enter it first"
        try:
            self._child.input.write(msgspec.json.encode(order) + b"\n")
            self._child.input.flush()
        except OSError as error:
            raise self._failure() from error

    def _receive(self) -> News:
        assert self._child is not None, "enter it first"
        try:
            return msgspec.json.decode(self._child.output.readline(), type=News)
        except msgspec.DecodeError as error:
            raise self._failure() from error

    def _failure(self) -> TargetFailure:
        assert self._child is not None
        self._child.wait(_END_S)
        words = self._child.last_words()
        cause = FailureLog(words.splitlines()).cause(self._child.returncode)
        return TargetFailure(
            f"vLLM with {self._options.model} {self._child.ending} before its work was done. The end of its log:\n"
            f"{words}\nvLLM with {self._options.model} failed: {cause}"
        )
