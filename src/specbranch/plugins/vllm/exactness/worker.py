"""The process around one engine: reads a job from standard input, writes news to the given file descriptor.

A process for each engine, one after the other: vLLM keeps global state, and a device may hold only one model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator

import msgspec

from specbranch.plugins.vllm.compat.engine import describe, json_shape
from specbranch.plugins.vllm.exactness.runs import Answer, Ask, Done, Job, News, Run
from specbranch.plugins.vllm.target import Request, Target, TargetOptions

_ATTEMPTS = 4  # at a run whose drafts came to nothing
_PAUSE_S = 2.0  # before another attempt


def main() -> None:
    """Run the job. Called as `python -m ... FD`."""
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as pipe:
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
        for news in work(job):
            pipe.write(msgspec.json.encode(news) + b"\n")


def work(job: Job) -> Iterator[News]:
    """Start the engine and run what it is asked to."""
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    options = TargetOptions(job.model, job.section, job.num_speculative_tokens, job.arguments)
    target = Target(options)
    yield News(engine=describe(target.llm))
    section = job.section
    for run in job.runs:
        if run.section is not None and run.section != section:
            target.use(run.section)
            section = run.section
        yield from decode(target, run, is_drafted=section is not None)


def decode(target: Target, run: Run, is_drafted: bool) -> Iterator[News]:
    """Run the requests; again if a draft should have helped and no token of it was accepted: nothing was checked then.

    That happens when the draft's process or the whole machine stood still: a target does not wait for it.
    """
    attempt, most = 0, _ATTEMPTS if is_drafted else 1
    accepted = 0
    while not accepted and attempt < most:
        if attempt:
            time.sleep(_PAUSE_S)
        attempt += 1
        before = target.draft_tokens()
        answers = yield from _answers(target, run, is_heard=attempt == 1)
        submitted, accepted = (now - then for now, then in zip(target.draft_tokens(), before, strict=True))
    yield News(done=Done(run.name, answers, submitted, accepted, attempt))


def _answers(target: Target, run: Run, is_heard: bool) -> Generator[News, None, list[Answer]]:
    answers: list[Answer] = []
    size = run.batch or max(1, len(run.asks))
    for start in range(0, len(run.asks), size):
        asks = run.asks[start : start + size]
        answers_here = [Answer([], "") for _ in asks]
        for piece in target.stream([_request(target, ask) for ask in asks]):
            so_far = answers_here[piece.index]
            answers_here[piece.index] = Answer(
                so_far.tokens + piece.tokens,
                so_far.text + piece.text,
                piece.finish_reason,
                so_far.logprobs + piece.logprobs,
            )
            if piece.finish_reason is not None and is_heard:
                yield News(num_ended=1)
        answers += answers_here
    return answers


def _request(target: Target, ask: Ask) -> Request:
    encode: Callable[[str], list[int]] = target.encode
    schema = {} if ask.schema is None else {"structured_outputs": json_shape(ask.schema)}
    return Request(encode(ask.prompt), {**ask.sampling, **schema})


if __name__ == "__main__":
    main()
