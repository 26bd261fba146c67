"""The process of a target: options and runs come in on standard input, news go out on standard output.

A process for each engine: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence

import msgspec

from specbranch.plugins.vllm.compat import engine
from specbranch.plugins.vllm.messages import Answer, Ask, Done, News, Run
from specbranch.plugins.vllm.target import Request, Target, TargetOptions

_PAUSE_S = 2.0  # before another attempt


def main() -> None:
    """Serve until standard input closes."""
    # What vLLM prints must not come between our lines.
    with os.fdopen(os.dup(1), "wb", buffering=0) as output:
        os.dup2(2, 1)
        for news in serve(sys.stdin.buffer):
            output.write(msgspec.json.encode(news) + b"\n")


def serve(lines: Iterator[bytes]) -> Iterator[News]:
    """Load what the first line asks for, then do one run for each further line."""
    target = Target(msgspec.json.decode(next(lines), type=TargetOptions))
    with contextlib.closing(target):
        yield News(engine=engine.describe(target.llm))
        for line in lines:
            yield from decode(target, msgspec.json.decode(line, type=Run))


def decode(target: Target, run: Run) -> Iterator[News]:
    """Do a run; again, if it may, when no draft token was accepted: that run compares nothing.

    This happens when the draft's process or the whole machine was stalled: a target does not wait for drafts.
    """
    if run.settings is not None:
        target.use(run.settings)
    requests = [_request(target, ask) for ask in run.asks]
    for attempt in range(1, run.attempts + 1):
        if attempt > 1:
            time.sleep(_PAUSE_S)
        done = yield from _attempt(target, requests, run.batch or max(1, len(requests)), is_first=attempt == 1)
        if done.accepted:
            break
    yield News(done=msgspec.structs.replace(done, attempts=attempt))


def _attempt(target: Target, requests: Sequence[Request], batch: int, is_first: bool) -> Generator[News, None, Done]:
    """Decode all requests; requests that finish are told in the first attempt only."""
    answers = [Answer(prompt=list(request.prompt)) for request in requests]
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
                yield News(num_finished=1)
    elapsed_s = time.monotonic() - start_s
    submitted, accepted = (after - before for after, before in zip(target.draft_tokens(), drafts, strict=True))
    return Done(
        answers=answers,
        submitted=submitted,
        accepted=accepted,
        elapsed_s=elapsed_s,
        counts={name: count - counts[name] for name, count in target.proposer_counts().items()},
    )


def _request(target: Target, ask: Ask) -> Request:
    schema = {} if ask.schema is None else {"structured_outputs": engine.json_shape(ask.schema)}
    return Request(_encoded(target, ask), {**ask.sampling, **schema})


def _encoded(target: Target, ask: Ask) -> list[int]:
    if ask.tokens is not None:
        return ask.tokens
    return target.encode_chat([{"role": "user", "content": ask.prompt}]) if ask.is_chat else target.encode(ask.prompt)


if __name__ == "__main__":
    main()
