#!/usr/bin/env python
"""What drafts cost a step of vLLM that is as short as on a GPU: the hook, the client, the wait, the service's lookup.

benchmarks/step_cost.py STAND_IN, a model of scripts/stand_in.py, is the target on one core and, where no other is named,
the draft on another. A hit had all its answers before it asked.
All requests begin with the same text, so that both sides prefill it once. Nothing of the product is changed: what is
timed is wrapped from here, in this process and in that of the service. Beside each time stands what the processor worked
in it: on a busy machine only that can be compared. `--table` prints the kept result for the docs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.planners import DEFAULT_PLANNER
from specbranch.launch.child import PIPE, Child
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions, Request
from specbranch.machine import provenance
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions

RESULT = Path(__file__).parent / "step-cost.json"
GAMMA = 8
MAX_MODEL_LEN = 24576
WARM_UP = 10  # steps
OWN_LEN = 16  # tokens at the end of a prompt that no other request has
_START_S = 120.0
_CATCH_UP_S = 60.0  # for the draft to read all prompts; after that the steps are measured as they are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stand_in", nargs="?", help="directory of the model")
    parser.add_argument("--draft", help="directory of the draft; default: the same")
    parser.add_argument("--requests", type=numbers, default=[1, 8, 64], help="decoded together; default: 1,8,64")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384], help="default: 1024,4096,16384")
    parser.add_argument("--steps", type=int, default=300, help="measured at each size")
    parser.add_argument("--planner", default=DEFAULT_PLANNER)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of the kept result")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the service's process
    args = parser.parse_args()
    if args.serve:
        serve(Path(args.serve[0]), args.serve[1:])
    elif args.table:
        print(table(json.loads(args.out.read_text())))
    elif args.stand_in is None:
        parser.error("name the directory of a stand-in, made by scripts/stand_in.py")
    else:
        measure_all(args)
        print(table(json.loads(args.out.read_text())))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@dataclass(slots=True)
class Call:
    """One call of the hook; `client_s` and `wait_s` are parts of it, the second also of the first.

    `work_s` and `lookup_work_s` are processor time.
    """

    start_s: float
    end_s: float = 0.0
    work_s: float = 0.0
    client_s: float = 0.0
    wait_s: float = 0.0
    num_drafted: int = 0  # rows that got a draft
    num_asked: int = 0  # rows that wanted one
    num_told: int = 0  # of them, rows whose answer was there before they asked
    lookup_s: float = 0.0  # in the service
    lookup_work_s: float = 0.0


@dataclass(slots=True)
class Step:
    """One step of the engine, with the call of the hook in it."""

    start_s: float
    end_s: float
    work_s: float
    num_rows: int
    num_tokens: int
    call: Call | None


class Watch:
    """Times steps, hook and client of this process from outside."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._call: Call | None = None  # that is under way
        self._last: Call | None = None  # of this step

    def install(self) -> None:
        """Wrap the classes; to be called before vLLM makes its proposer."""
        import zmq

        from specbranch.plugins.vllm.runner_v1 import SpecBranchProposer

        wrap(SpecBranchProposer, "propose", self._hook)
        wrap(DraftClient, "propose", self._client)
        wrap(zmq.Poller, "poll", functools.partial(self._part, "wait_s"))

    def follow(self, llm_engine: Any) -> None:
        """Time the steps of an engine."""
        wrap(llm_engine, "step", self._step)

    def _step(self, inner: Callable[..., Any]) -> Any:
        self._last = None
        start_s, start_work_s = time.monotonic(), time.process_time()
        outputs = inner()
        end_s, work_s = time.monotonic(), time.process_time() - start_work_s
        num_tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
        self.steps.append(Step(start_s, end_s, work_s, len(outputs), num_tokens, self._last))
        return outputs

    def _hook(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start_work_s = time.process_time()
        self._call = self._last = call = Call(time.monotonic())
        try:
            drafts = inner(*args, **kwargs)
        finally:
            call.end_s, call.work_s = time.monotonic(), time.process_time() - start_work_s
            self._call = None
        call.num_drafted = sum(len(draft) > 0 for draft in drafts)
        return drafts

    def _client(self, inner: Callable[..., Any], client: DraftClient, rows: Sequence[Any], *args: Any) -> Any:
        before = client.counts.prefetched
        drafts = self._part("client_s", inner, client, rows, *args)
        if self._call is not None:
            self._call.num_asked, self._call.num_told = len(rows), client.counts.prefetched - before
        return drafts

    def _part(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            if self._call is not None:
                setattr(self._call, name, getattr(self._call, name) + time.monotonic() - start_s)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around` be called in place of a method, with the method first. A method that does not exist is left out."""
    inner = getattr(owner, name, None)
    if inner is not None:
        setattr(owner, name, functools.wraps(inner)(lambda *args, **kwargs: around(inner, *args, **kwargs)))


def serve(log_file: Path, words: Sequence[str]) -> None:
    """`specbranch` with these words; when it ends, the log has the spans of all lookups."""
    from specbranch.cli import app
    from specbranch.service.server.server import Server

    lookups: list[tuple[float, float, float]] = []

    def look_up(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start_s, start_work_s = time.monotonic(), time.thread_time()
        try:
            return inner(*args, **kwargs)
        finally:
            lookups.append((start_s, time.monotonic(), time.thread_time() - start_work_s))

    wrap(Server, "_serve_messages", look_up)
    try:
        app(words, prog_name="specbranch")
    finally:
        log_file.write_text(json.dumps(lookups))


@contextlib.contextmanager
def service(model: str, core: int, directory: Path) -> Iterator[tuple[str, Path]]:
    """The address of a watched draft service, and the log that it writes when it ends."""
    address, log_file = f"ipc://{directory}/draft.sock", directory / "service.json"
    log_file.unlink(missing_ok=True)
    options = DraftServiceOptions(model, engine="torch", dtype="float32", cores=[core], threads=1)
    command = [sys.executable, __file__, "--serve", str(log_file), *options.arguments(address)]
    child = Child(command, cores=[core], log_file=directory / "draft.log", stdin=PIPE)
    try:
        with contextlib.closing(DraftClient(ClientOptions(address))) as client:
            if child.wait_until(lambda: client.hello(0.5), _START_S) is None:
                raise SystemExit(f"the draft service {child.exit_summary}:\n{child.log_tail()}")
        yield address, log_file
        child.close_input()
        child.wait(30.0)
    finally:
        child.kill()


def measure_all(args: argparse.Namespace) -> None:
    """Every size, one after the other, each with a fresh service; the file is written again after each."""
    source = provenance()
    target_core, draft_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {target_core})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    watch = Watch()
    watch.install()
    with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
        target = LocalEngine(LocalEngineOptions(args.stand_in, settings("none"), GAMMA, arguments(max(args.requests))))
        watch.follow(target.llm.llm_engine)
        document: dict[str, Any] = {"provenance": source, "engine": describe(target), "model": model_of(args.stand_in)}
        document |= {
            "draft": model_of(args.draft or args.stand_in),
            "planner": args.planner,
            "gamma": GAMMA,
            "sizes": [],
        }
        for context_len in args.contexts:
            for num_requests in args.requests:
                requests = make_requests(target, num_requests, context_len)
                plain, _ = measure(target, watch, settings("none"), requests, args.steps)
                with service(args.draft or args.stand_in, draft_core, Path(name)) as (address, log_file):
                    steps, has_caught_up = measure(target, watch, settings(args.planner, address), requests, args.steps)
                join(steps, json.loads(log_file.read_text()))
                size = {"requests": num_requests, "context": context_len, "has_caught_up": has_caught_up}
                size["load"] = round(os.getloadavg()[0], 1)  # two on an idle machine: target and draft
                document["sizes"].append(size | summary(plain, steps))
                args.out.write_text(json.dumps(document, indent=1) + "\n")
                print(json.dumps(document["sizes"][-1]), flush=True)


def arguments(num_requests: int) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": num_requests,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": True,  # of the text that all requests begin with
        "seed": 0,
    }


def describe(target: LocalEngine) -> dict[str, Any]:
    import msgspec

    from specbranch.launch import vllm_engine as engine

    found: dict[str, Any] = msgspec.to_builtins(engine.describe_engine(target.llm))
    return found


def model_of(stand_in: str) -> dict[str, Any]:
    config = json.loads((Path(stand_in) / "config.json").read_text())
    return {name: config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


def settings(planner: str, address: str = "ipc:///nowhere") -> ProposerSettings:
    # On a CPU a longer step costs more, and nothing would be submitted; a GPU's is flat at these sizes.
    own = {"cost_aware": False} if planner == "budget" else {}
    return ProposerSettings(address=address, planner=planner, settings=own, is_gated=False)


def make_requests(target: LocalEngine, num_requests: int, context_len: int) -> list[Request]:
    """Random prompts that differ in their last tokens only."""
    chance = np.random.default_rng(context_len)
    vocab_len = len(target.llm.get_tokenizer())
    common = chance.integers(1000, vocab_len, context_len - OWN_LEN).tolist()
    sampling = {"temperature": 0.0, "max_tokens": MAX_MODEL_LEN - context_len - GAMMA, "ignore_eos": True}
    own = chance.integers(1000, vocab_len, (num_requests, OWN_LEN)).tolist()
    return [Request([*common, *tokens], sampling) for tokens in own]


def measure(
    target: LocalEngine, watch: Watch, chosen: ProposerSettings, requests: Sequence[Request], num_steps: int
) -> tuple[list[Step], bool]:
    """So many steps that decode all requests, and whether half of them had a draft before the first was counted."""
    target.configure(chosen)
    watch.steps.clear()
    num_requests, needed = len(requests), 0 if chosen.planner == "none" else -(-len(requests) // 2)
    whole: list[Step] = []
    first: int | None = None
    has_caught_up, num_seen = False, 0
    with contextlib.closing(target.stream(requests)) as pieces:
        for _ in pieces:
            new, num_seen = watch.steps[num_seen:], len(watch.steps)
            whole += [step for step in new if step.num_rows == num_requests and step.call is not None]
            if not whole:
                continue
            if first is None and len(whole) >= WARM_UP:
                # In several steps one after the other: guesses from the text come before the draft has read it all.
                calls = [step.call for step in whole[-WARM_UP:]]
                has_caught_up = all(call is not None and call.num_drafted >= needed for call in calls)
                if has_caught_up or whole[-1].end_s - whole[0].start_s > _CATCH_UP_S:
                    first = len(whole)
            if first is not None and len(whole) >= first + num_steps:
                break
    if first is None or len(whole) < first + num_steps:
        raise SystemExit(f"{num_requests} requests ended before {num_steps} steps were measured; give fewer --steps")
    return whole[first : first + num_steps], has_caught_up


def join(steps: Sequence[Step], lookups: Sequence[tuple[float, float, float]]) -> None:
    """Add to every call what the service did for it: from its start to that of the next."""
    calls = [step.call for step in steps if step.call is not None]
    starts = [call.start_s for call in calls]
    ends = [*starts[1:], steps[-1].end_s]

    for start_s, end_s, work_s in lookups:
        index = bisect_right(starts, start_s) - 1
        if index >= 0 and start_s < ends[index]:
            calls[index].lookup_s += end_s - start_s
            calls[index].lookup_work_s += work_s


def is_hit(step: Step) -> bool:
    """Whether there was a draft, and nobody had to be asked for it."""
    return step.call is not None and step.call.num_drafted > 0 and step.call.num_told == step.call.num_asked


def summary(plain: Sequence[Step], steps: Sequence[Step]) -> dict[str, Any]:
    """Times without drafts and with them, apart for hits and other steps."""
    num_rows = steps[0].num_rows
    hits = [step for step in steps if is_hit(step)]
    others = [step for step in steps if not is_hit(step)]
    drafted = sum(step.call.num_drafted for step in steps if step.call)
    told = sum(step.call.num_told for step in steps if step.call)
    return {
        "plain_step_ms": spread([step.end_s - step.start_s for step in plain]),
        "plain_step_work_ms": spread([step.work_s for step in plain]),
        "tokens_per_row": round(sum(step.num_tokens for step in steps) / len(steps) / num_rows, 2),
        "drafted_rows": round(drafted / len(steps) / num_rows, 3),
        "told_rows": round(told / len(steps) / num_rows, 3),
        "hits": parts(hits),
        "others": parts(others),
    }


def parts(steps: Sequence[Step]) -> dict[str, Any]:
    """The parts of the hook in these steps, in milliseconds and, for all of it, as a share of its step."""
    if not steps:
        return {"steps": 0}
    pairs = [(step, step.call) for step in steps if step.call is not None]
    times_s = {
        "step": [step.end_s - step.start_s for step, _ in pairs],
        "step_work": [step.work_s for step, _ in pairs],
        "hook": [call.end_s - call.start_s for _, call in pairs],
        "hook_work": [call.work_s for _, call in pairs],
        "client": [call.client_s - call.wait_s for _, call in pairs],
        "wait": [call.wait_s for _, call in pairs],
        "lookup": [call.lookup_s for _, call in pairs],
        "lookup_work": [call.lookup_work_s for _, call in pairs],
    }
    return {
        "steps": len(steps),
        **{f"{name}_ms": spread(found) for name, found in times_s.items()},
        "hook_share": share(times_s["hook"], times_s["step"]),
        "hook_work_share": share(times_s["hook_work"], times_s["step_work"]),
    }


def share(parts_s: Sequence[float], wholes_s: Sequence[float]) -> float:
    """The median share of a part."""
    return round(float(np.median(np.divide(parts_s, wholes_s))), 4)


def spread(times_s: Sequence[float]) -> list[float]:
    """Median and 99th percentile in milliseconds."""
    return [round(1e3 * float(value), 3) for value in np.percentile(times_s, [50, 99])]


_COLUMNS = "requests|context|kind|n|step|hook|client|wait|lookup|share|CPU step|CPU hook|CPU lookup|CPU share"


def table(document: dict[str, Any]) -> str:
    """The result as Markdown, a line for the hits of each size and one for its other steps: medians, and the hook's p99."""
    lines = [f"|{_COLUMNS}|", "---".join("|" * (_COLUMNS.count("|") + 2))]
    for size in document["sizes"]:
        for kind in ("hits", "others"):
            if size[kind]["steps"]:
                cells = [f"{size['requests']}", f"{size['context']:,}", kind, *_cells(size[kind])]
                lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def _cells(found: dict[str, Any]) -> list[str]:
    times = {name.removesuffix("_ms"): value for name, value in found.items() if name.endswith("_ms")}
    return [
        f"{found['steps']}",
        _ms(times["step"][0]),
        "/".join(map(_ms, times["hook"])),
        *(_ms(times[name][0]) for name in ("client", "wait", "lookup")),
        f"{found['hook_share']:.0%}",
        *(_ms(times[f"{name}_work"][0]) for name in ("step", "hook", "lookup")),
        f"{found['hook_work_share']:.0%}",
    ]


def _ms(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


if __name__ == "__main__":
    main()
