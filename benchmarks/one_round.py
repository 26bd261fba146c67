#!/usr/bin/env python
"""Count the calls of one round: from vLLM's hook through client and service to the draft step and the pushed answer.

The real proposer, client, server and draft loop run in one process, turn by turn, on a scripted engine; of vLLM there
are only the objects that the hook is handed. Counted are calls into the package, comprehensions left out, with the
files that they lie in. A *hit* is a round whose answer had been pushed before the verdict; *asked* is one whose
answer had not, and holds hook and service. Times of `drafts_by_verdict` are medians with everything else at rest.

benchmarks/one_round.py --name NAME    count, time, and keep the result by this name in one-round.json
benchmarks/one_round.py --trace        also print the calls of one hit, the most frequent first
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import zmq

import specbranch
from specbranch.core.distribution import Distribution
from specbranch.engines.base import Row
from specbranch.machine import provenance
from specbranch.plugins.vllm import SpecBranchProposer, compat
from specbranch.service.client.gate import StepTimer
from specbranch.service.server.listener import Listener, listening
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.simulation.scripted import ScriptedEngine, TextScript

PACKAGE = str(Path(specbranch.__file__).parent)
VOCAB_LEN = 1000
GAMMA = 8
PROMPT_LEN = 64
WARM_UP = 20  # rounds
DRAFT_TURNS = 7  # in the time of one target step
TARGET_S, DRAFT_S = (0.04, 0.0005), (0.005, 0.003)  # of a step, and of each token in it
RIGHT = 0.85  # of the draft's first choices
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_STAGE = ("simulation" + os.sep, "machine.py")  # what stands in for the engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "one-round.json")
    parser.add_argument("--name", help="of this run in the file; without one nothing is kept")
    parser.add_argument("--trace", action="store_true", help="print the calls of one hit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specbranch-") as directory:
        stage = Stage(f"ipc://{directory}/draft.sock")
        try:
            parts = count_rounds(stage, args.rounds, args.trace)
            result = {
                "provenance": provenance(),
                "rounds": args.rounds,
                "parts": {name: part.summary() for name, part in parts.items()},
                "drafts_by_verdict_us": time_pushes(stage),
            }
        finally:
            stage.close()
    if args.name:
        runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else {}
        document = {"provenance": result["provenance"], "runs": runs | {args.name: result}}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(result))


def number(*words: object) -> float:
    """A number from 0 to 1 that depends on the words only."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=6).digest(), "big") / (1 << 48)


def draft_distribution(text: tuple[int, ...]) -> Distribution:
    """Three tokens, the first of them more or less sure."""
    end = text[-3:]
    first = 0.55 + 0.44 * number("sure", end)
    ids = tuple(int(VOCAB_LEN * number(rank, end)) for rank in range(3))
    if len(set(ids)) < 3:
        ids = (1, 2, 3)
    rest = 1 - first
    return Distribution(ids, (first, 0.6 * rest, 0.3 * rest), 1.0)


def target_token(text: tuple[int, ...]) -> int:
    """What the target says: mostly the draft's first choice, else its second or another token."""
    ids, luck = draft_distribution(text).ids, number("target", len(text), text[-3:])
    return ids[0] if luck < RIGHT else ids[1] if luck < 0.95 else (ids[2] + 1) % VOCAB_LEN


@dataclass(slots=True)
class Calls:
    """The calls of one span."""

    names: list[tuple[str, str]] = field(default_factory=list)  # file, function

    @property
    def num_switches(self) -> int:
        """How often the next call is in another file."""
        return sum(one[0] != other[0] for one, other in zip(self.names, self.names[1:], strict=False))


@dataclass(slots=True)
class Part:
    """The spans of one kind."""

    spans: list[Calls] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians, with the range of calls."""
        calls = [len(span.names) for span in self.spans]
        files = [len({file for file, _ in span.names}) for span in self.spans]
        functions = [len(set(span.names)) for span in self.spans]
        return {
            "spans": len(calls),
            "calls": [median(calls), min(calls), max(calls)],
            "files": [median(files), max(files)],
            "functions": median(functions),
            "switches": median(span.num_switches for span in self.spans),
        }


def counted(act: Callable[..., Any], *args: Any) -> tuple[Any, Calls]:
    """What a function returns, and the calls into the package that it made on this thread."""
    calls = Calls()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in _INLINE and code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE + os.sep)
            if not file.startswith(_STAGE):
                calls.names.append((file, code.co_qualname))

    sys.setprofile(on_event)
    try:
        return act(*args), calls
    finally:
        sys.setprofile(None)


class Clock:
    """Time that passes only while one of the two models runs."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TimedEngine(ScriptedEngine):
    """A scripted engine whose steps take time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(TextScript(VOCAB_LEN, draft_distribution))
        self._clock = clock

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self._clock.now_s += DRAFT_S[0] + DRAFT_S[1] * sum(len(row.tokens) for row in rows)
        return super().run(rows)


class Stage:
    """A target of one request, and the service that drafts for it, on one thread."""

    def __init__(self, address: str) -> None:
        self._clock = Clock()
        self.server = Server(TimedEngine(self._clock), ServiceOptions(address), clock=self._clock)
        self._context: zmq.Context[Any] = zmq.Context()
        self._listening = listening(self._context, address, None)
        self.listener: Listener = self._listening.__enter__()
        self.proposer = make_proposer(address)
        self.runner = v1_runner()
        client: Any = self.proposer.core._client
        self.client = client
        connection: Any = client.connection
        client._clock = connection._clock = connection.channel._clock = self._clock
        self.proposer.core._timer = StepTimer(self._clock)
        wrap_wait(connection.channel._transport, self.serve)
        prompt = [int(VOCAB_LEN * number("prompt", place)) for place in range(PROMPT_LEN)]
        self._table = np.zeros((1, 100_000), dtype=np.int32)
        self._table[0, :PROMPT_LEN] = prompt
        self._len = PROMPT_LEN
        self.draft: list[int] = []

    def close(self) -> None:
        self.client.close()
        self._listening.__exit__(None, None, None)
        self._context.term()

    def serve(self) -> None:
        """One turn of the lookup thread, if anything has come within a moment."""
        self.listener.socket.poll(20)
        self.server.turn(self.listener)

    def verify(self) -> list[int]:
        """The target's step: what it commits after the draft."""
        self._clock.now_s += TARGET_S[0] + TARGET_S[1] * len(self.draft)
        text = tuple(self._table[0, : self._len].tolist())
        committed: list[int] = []
        for token in [*self.draft, None]:
            committed.append(target_token((*text, *committed)))
            if token != committed[-1]:
                break
        self._table[0, self._len : self._len + len(committed)] = committed
        self._len += len(committed)
        return committed

    def hook(self, committed: list[int]) -> None:
        """What vLLM calls around a step."""
        drafts = self.proposer.propose([committed], np.array([self._len]), self._table)
        self.draft = drafts[0]


def count_rounds(stage: Stage, num_rounds: int, is_traced: bool) -> dict[str, Part]:
    """Run rounds and count their parts."""
    names = ("hook, hit", "service, hit", "asked", "draft step", "push", "round, hit")
    parts = {name: Part() for name in names}
    stage.proposer.on_step_scheduled(stage.runner, compat.StepInfo())
    has_traced = False
    for index in range(WARM_UP + num_rounds):
        committed = stage.verify()
        before = stage.client.counts.prefetched
        _, hook = counted(stage.hook, committed)
        is_hit = stage.client.counts.prefetched > before
        _, service = counted(stage.serve)
        _, step = counted(stage.server.runner.run_step)
        _, push = counted(stage.serve)
        for _ in range(DRAFT_TURNS - 1):
            stage.server.runner.run_step()
            stage.serve()
        if index < WARM_UP:
            continue
        if is_hit:
            whole = Calls(hook.names + service.names + step.names + push.names)
            found = zip(names, (hook, service, None, step, push, whole), strict=True)
            if is_traced and not has_traced:
                has_traced = True
                for title, calls in zip(names, (hook, service, None, step, push), strict=False):
                    if calls is not None:
                        print(title)
                        print_trace(calls)
        else:
            found = zip(names, (None, None, Calls(hook.names + service.names), step, push, None), strict=True)
        for name, span in found:
            if span is not None:
                parts[name].spans.append(span)
    return parts


def time_pushes(stage: Stage, count: int = 16, num_times: int = 2000) -> float:
    """Median microseconds of what is prepared for so many verdicts, as the last round has left the tree."""
    (session,) = stage.server.store.snapshot()
    times_s = []
    for _ in range(num_times):
        start_s = time.perf_counter()
        session.core.drafts_by_verdict(count)
        times_s.append(time.perf_counter() - start_s)
    return round(1e6 * median(times_s), 1)


def make_proposer(address: str) -> SpecBranchProposer:
    """The proposer with a vLLM of which there is only the configuration."""
    compat.warn_if_untested = lambda: None
    compat.is_output_rank = lambda: True
    compat.wrap_runners = lambda: None
    config = SimpleNamespace(
        additional_config={"specbranch": {"address": address}},
        speculative_config=SimpleNamespace(num_speculative_tokens=GAMMA),
        model_config=SimpleNamespace(
            max_model_len=100_000,
            get_vocab_size=lambda: VOCAB_LEN,
            served_model_name="scripted",
            tokenizer="",
            model="",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            distributed_executor_backend="uni",
        ),
    )
    config.additional_config["specbranch"] |= {"is_gated": False, "deadline_ms": 1000}
    return SpecBranchProposer(config)


def v1_runner() -> Any:
    """What the hook looks at of vLLM's runner."""
    request = SimpleNamespace(mm_features=[], sampling_params=SimpleNamespace(temperature=0.0, seed=None))
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["request"], request_lora_mapping=np.zeros(1, dtype=np.int64)),
        requests={"request": request},
    )


def wrap_wait(transport: Any, serve: Callable[[], None]) -> None:
    """While the client waits, the service works: both are on one thread."""
    inner = transport.await_readable

    def await_readable(timeout_s: float) -> bool:
        serve()
        return bool(inner(0.0))

    transport.await_readable = await_readable


def print_trace(calls: Calls) -> None:
    for (file, name), number in Counter(calls.names).most_common():
        print(f"{number:4d}  {file}  {name}")


def table(result: dict[str, Any]) -> str:
    lines = ["| part | spans | calls | files | functions | switches |", "|---|---|---|---|---|---|"]
    for name, part in result["parts"].items():
        middle, low, high = part["calls"]
        lines.append(
            f"| {name} | {part['spans']} | {middle:g} ({low}-{high}) | {part['files'][0]:g} | {part['functions']:g} "
            f"| {part['switches']:g} |"
        )
    return "\n".join([*lines, "", f"drafts_by_verdict(16): {result['drafts_by_verdict_us']} µs"])


if __name__ == "__main__":
    main()
