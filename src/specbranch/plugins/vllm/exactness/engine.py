"""An engine in a process of its own, seen from outside: hand it a job, hear its news, get what its runs became."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specbranch.plugins.vllm.exactness.runs import Done, Job, News

WORKER = "specbranch.plugins.vllm.exactness.worker"
_TAIL = 3000


class EngineFailure(RuntimeError):
    """The engine's process ended before its work; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Worked:
    """What became of a job: how the engine describes itself, and its runs by name."""

    engine: dict[str, str]
    runs: dict[str, Done]


def run_job(job: Job, on_news: Callable[[News], None]) -> Worked:
    """Start a process, let it do the job, and wait for it. The process does not outlive this call."""
    with tempfile.TemporaryDirectory(prefix="specbranch-check-") as directory:
        log = Path(directory) / "engine.log"
        process, pipe = _start(job, log)
        engine: dict[str, str] = {}
        runs: dict[str, Done] = {}
        try:
            with os.fdopen(pipe, "rb") as lines:
                for line in lines:
                    news = msgspec.json.decode(line, type=News)
                    engine = news.engine or engine
                    if news.done is not None:
                        runs[news.done.name] = news.done
                    on_news(news)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if len(runs) < len(job.runs):
            raise EngineFailure(
                f"vLLM with {job.model} ended with code {code} before its work was done. Its last words:\n"
                + log.read_text(errors="replace")[-_TAIL:]
            )
        return Worked(engine, runs)


def _start(job: Job, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    reader, writer = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(writer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            env={**os.environ, **({"OMP_NUM_THREADS": str(len(job.cores))} if job.cores else {})},
        )
    os.close(writer)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; its log says why
    return process, reader
