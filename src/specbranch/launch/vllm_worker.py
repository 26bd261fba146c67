"""A vLLM engine in a process of its own: the protocol, the caller's end and the worker's end.

vLLM keeps global state and reads its environment when it is imported, so each engine needs its own process. A target
that has no job sleeps, so several targets can share the same cores and be measured in turns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from specbranch.errors import SpecBranchError
from specbranch.launch import vllm_engine
from specbranch.launch.child import PIPE, Child
from specbranch.launch.vllm_engine import Engine, LocalEngine, LocalEngineOptions, Request
from specbranch.launch.vllm_log import FailureParser
from specbranch.plugins.vllm.settings import ProposerSettings

_WORKER = "specbranch.launch.vllm_worker"
_STOP_S = 30.0
_END_S = 5.0  # for the end of a process that has closed its output
_PAUSE_S = 2.0  # before another attempt


class TargetFailure(SpecBranchError, RuntimeError):
    """A target's process ended before its job was done; the message has the end of its log."""


class TargetProcess:
    """A context manager that loads vLLM in a new process, on `cores` or else on all cores of this process.

    Inside `with`, `engine` describes the loaded engine. The process logs to `log_file`.
    """

    engine: Engine

    def __init__(self, options: LocalEngineOptions, log_file: Path, cores: Collection[int] | None = None) -> None:
        self._options = options
        self._log_file = log_file
        self._cores = cores or None
        self._child: Child | None = None

    def run(self, job: DecodeJob, on_finished: Callable[[int], None] | None = None) -> DecodeResult:
        """Run a job and return its result; each time requests finish, call `on_finished` with their number."""
        self._send(job)
        while True:
            event = self._receive()
            if event.done is not None:
                return event.done
            if on_finished is not None:
                on_finished(event.num_finished)

    def __enter__(self) -> TargetProcess:
        self._child = Child(
            [sys.executable, "-m", _WORKER],
            environment=self._environment(),
            cores=self._cores,
            log_file=self._log_file,
            stdin=PIPE,
            stdout=PIPE,
            has_group=True,  # so that `kill` ends vLLM's workers too
        )
        try:
            self._send(self._options)
            event = self._receive()
            assert event.engine is not None, "the first event describes the engine"
            self.engine = event.engine
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
        """Return the environment variable that gives vLLM one thread per core.

        Empty if the process is not pinned, or the user has set a number of threads.
        """
        if not self._cores or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(len(self._cores))}

    def _send(self, message: LocalEngineOptions | DecodeJob) -> None:
        assert self._child is not None, "enter it first"
        try:
            self._child.input.write(msgspec.json.encode(message) + b"\n")
            self._child.input.flush()
        except OSError as error:
            raise self._failure() from error

    def _receive(self) -> WorkerEvent:
        assert self._child is not None, "enter it first"
        try:
            return msgspec.json.decode(self._child.output.readline(), type=WorkerEvent)
        except msgspec.DecodeError as error:
            raise self._failure() from error

    def _failure(self) -> TargetFailure:
        assert self._child is not None
        self._child.wait(_END_S)
        log = self._child.log_tail()
        cause = FailureParser(log.splitlines()).cause(self._child.returncode)
        return TargetFailure(
            f"vLLM with {self._options.model} {self._child.exit_summary} before its job was done. "
            f"The end of its log:\n{log}\nvLLM with {self._options.model} failed: {cause}"
        )


def main() -> None:
    """Run the worker: load an engine and run the jobs that arrive on standard input, until that closes."""
    # Standard output carries the events, so what vLLM prints must go to standard error.
    with os.fdopen(os.dup(1), "wb", buffering=0) as output:
        os.dup2(2, 1)
        for event in serve(sys.stdin.buffer):
            output.write(msgspec.json.encode(event) + b"\n")


def serve(lines: Iterator[bytes]) -> Iterator[WorkerEvent]:
    """Load the engine that the first line describes, then run the job of each further line; yield the events."""
    target = LocalEngine(msgspec.json.decode(next(lines), type=LocalEngineOptions))
    with contextlib.closing(target):
        yield WorkerEvent(engine=vllm_engine.describe_engine(target.llm))
        for line in lines:
            yield from decode(target, msgspec.json.decode(line, type=DecodeJob))


def decode(target: LocalEngine, job: DecodeJob) -> Iterator[WorkerEvent]:
    """Run a job, and repeat it while no draft token was accepted, up to `job.attempts` times; yield the events.

    A run without accepted draft tokens says nothing about decoding with drafts. It happens when the draft's process or
    the whole machine stalls, because a target does not wait for drafts.
    """
    if job.settings is not None:
        target.configure(job.settings)
    requests = [_request(target, ask) for ask in job.asks]
    for attempt in range(1, job.attempts + 1):
        if attempt > 1:
            time.sleep(_PAUSE_S)
        done = yield from _attempt(target, requests, job.batch or max(1, len(requests)), is_first=attempt == 1)
        if done.accepted:
            break
    yield WorkerEvent(done=msgspec.structs.replace(done, attempts=attempt))


def _attempt(
    target: LocalEngine, requests: Sequence[Request], batch: int, is_first: bool
) -> Generator[WorkerEvent, None, DecodeResult]:
    """Decode all requests, at most `batch` at a time, and return the result.

    Only the first attempt yields events for requests that finish, so that each is reported once.
    """
    answers = [DecodedOutput(prompt=list(request.prompt)) for request in requests]
    counts, drafts = target.proposer_counts(), target.draft_tokens()
    start_s = time.monotonic()
    for first in range(0, len(requests), batch):
        for piece in target.stream(requests[first : first + batch]):
            answer = answers[first + piece.index]
            answer.tokens += piece.tokens
            answer.text += piece.text
            answer.texts.append(piece.text)
            answer.logprobs += piece.logprobs
            answer.steps.append((piece.at_s - start_s, len(piece.tokens)))
            answer.finish_reason = piece.finish_reason
            if piece.finish_reason is not None and is_first:
                yield WorkerEvent(num_finished=1)
    elapsed_s = time.monotonic() - start_s
    submitted, accepted = (after - before for after, before in zip(target.draft_tokens(), drafts, strict=True))
    return DecodeResult(
        answers=answers,
        submitted=submitted,
        accepted=accepted,
        elapsed_s=elapsed_s,
        counts={name: count - counts[name] for name, count in target.proposer_counts().items()},
    )


def _request(target: LocalEngine, ask: PromptRequest) -> Request:
    schema = {} if ask.schema is None else {"structured_outputs": vllm_engine.structured_outputs(ask.schema)}
    return Request(_encoded(target, ask), {**ask.sampling, **schema})


def _encoded(target: LocalEngine, ask: PromptRequest) -> list[int]:
    if ask.tokens is not None:
        return ask.tokens
    return target.encode_chat([{"role": "user", "content": ask.prompt}]) if ask.is_chat else target.encode(ask.prompt)


class PromptRequest(msgspec.Struct, frozen=True):
    """One prompt. `sampling` are vLLM's sampling parameters; `schema` restricts the output to JSON of that schema.

    A chat prompt is a user's message, which the model's own template wraps; any other prompt is continued as it is.
    `tokens`, if not None, are the tokens to continue instead of the prompt.
    """

    prompt: str
    sampling: dict[str, Any]
    schema: dict[str, Any] | None = None
    is_chat: bool = False
    tokens: list[int] | None = None


class DecodeJob(msgspec.Struct, frozen=True):
    """Requests to decode together, at most `batch` at a time (0: all of them).

    `settings`, if not None, replace the proposer's settings from this job on. The job runs up to `attempts` times,
    until a draft token is accepted.
    """

    asks: list[PromptRequest]
    batch: int = 0
    settings: ProposerSettings | None = None
    attempts: int = 1


class DecodedOutput(msgspec.Struct, kw_only=True):
    """The output of one request; it grows while the request is decoded.

    `steps` has for each engine step that extended the output the seconds since the start of the run and the number of
    tokens; `texts` has the text of each step. `logprobs` has the log-probabilities that vLLM reported for each token,
    and is empty if the request did not ask for any.
    """

    prompt: list[int] = []
    tokens: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = []
    steps: list[tuple[float, int]] = []
    texts: list[str] = []


class DecodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job; all numbers are of its last attempt.

    `submitted` and `accepted` count the draft tokens that vLLM verified and accepted; `counts` are the proposer's
    counters.
    """

    answers: list[DecodedOutput]
    submitted: int = 0
    accepted: int = 0
    attempts: int = 1
    elapsed_s: float = 0.0
    counts: dict[str, float] = {}


class WorkerEvent(msgspec.Struct, frozen=True):
    """One line from a target's process: the engine is loaded, requests have finished, or a job is done."""

    engine: Engine | None = None
    num_finished: int = 0
    done: DecodeResult | None = None


def step_gaps_s(answers: Sequence[DecodedOutput], skip: int = 0) -> list[float]:
    """Return the seconds between consecutive steps of each answer, all in one list.

    The first `skip` steps of each answer are left out.
    """
    return [end_s - start_s for answer in answers for (start_s, _), (end_s, _) in pairwise(answer.steps[skip:])]


if __name__ == "__main__":
    main()
