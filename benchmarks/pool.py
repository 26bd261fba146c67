#!/usr/bin/env python
"""What a pool of draft services does for its targets while one service is killed, comes back, and another is drained.

Real service processes and real target processes on real sockets; models are scripts, so that times are given and every
text is known: a draft step sleeps, a target step sleeps, and each text is compared with what the target says alone.
A hit is a row that gets a draft. At the end the simulator is asked about more targets and drafts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution
from specbranch.engines.base import Row
from specbranch.launch.child import PIPE, Child
from specbranch.machine import provenance
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.client.pool import draft_client
from specbranch.service.client.stats import StatsClient
from specbranch.service.client.transport import MessageChannel, ZmqTransport
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.wire.messages import Drain
from specbranch.simulation.scripted import ScriptedEngine, TextScript, match

RESULT = Path(__file__).parent / "pool.json"
TRACE = Path(__file__).parents[1] / "traces" / "qwen-coder-humaneval.jsonl.gz"
VOCAB = 1000
AGREEMENT = 85  # of a hundred tokens, the draft's first choice is the target's
NUM_SERVICES, NUM_TARGETS, NUM_ROWS = 3, 8, 2
DRAFT_STEP_S, TARGET_STEP_S = 0.004, 0.025
DEADLINE_S = 0.05
PROMPT_LEN, TEXT_LEN = 100, 80
KILL_S, RESTART_S, DRAIN_S, END_S = 10.0, 20.0, 30.0, 45.0
BIN_S = 0.5
SETTINGS = {"gamma": 4, "cost_aware": False, "uses_text": False, "uses_memory": False}
_START_S = 60.0


def main() -> None:
    args = run_arguments(__doc__, RESULT)
    if args is not None:
        document = measure() | {"simulated": simulated()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps({name: document[name] for name in document if name not in ("hits_per_s", "provenance")}))


def run_arguments(description: str | None, result: Path) -> argparse.Namespace | None:
    """Return the arguments of a run; in a process that a run has started, do its part and return None."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=result)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.target is not None:
        decode(args.target, args.addresses, args.begin, args.out)
    else:
        return args
    return None


def number_of(text: Sequence[int], salt: bytes) -> int:
    """A number made of the end of a text."""
    tail = np.asarray(text[-4:], dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(tail, digest_size=8, salt=salt).digest(), "little")


def target_token(text: Sequence[int]) -> int:
    """What the target says after a text."""
    return number_of(text, b"target") % VOCAB


def draft_distribution(text: Sequence[int]) -> Distribution:
    """What the draft thinks of it."""
    right, wrong = target_token(text), number_of(text, b"wrong") % VOCAB
    wrong += wrong == right
    agrees = number_of(text, b"agrees") % 100 < AGREEMENT
    return Distribution((right, wrong) if agrees else (wrong, right), (0.8, 0.2), 0.5)


class SlowEngine(ScriptedEngine):
    """A scripted engine whose steps take time."""

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        time.sleep(DRAFT_STEP_S)
        return super().run(rows)


def serve(address: str) -> None:
    """One draft service, until who started it is gone."""
    server = Server(SlowEngine(TextScript(VOCAB, draft_distribution)), ServiceOptions(address))
    threading.Thread(target=lambda: (sys.stdin.read(), server.stop()), daemon=True).start()
    server.serve()


@dataclass
class Text:
    """One text that a target decodes greedily; a new one follows when it is done."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    num_new: int = 0

    def verify(self) -> int:
        """Verify the draft; how many of its tokens were accepted."""
        if not self.tokens:
            self.tokens = list(self.prompt)
        base, draft = self.tokens, self.draft
        verdict = match(draft, lambda index: target_token([*base[-4:], *draft[:index]]))
        new = verdict.committed(draft)
        self.tokens, self.num_new, self.draft = [*base, *new], len(new), []
        return verdict.accepted

    def is_right(self) -> bool:
        """Whether the text is what the target says alone."""
        text = list(self.prompt)
        while len(text) < len(self.tokens):
            text.append(target_token(text))
        return text == self.tokens


def prompt_of(target: int, row: int, number: int) -> list[int]:
    """Targets 0 and 1 have the same prompts, and so have each further two."""
    seed = 1000 * (target // 2) + 100 * row + number
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, PROMPT_LEN)]


def decode(target: int, addresses: Sequence[str], begin_s: float, out: Path) -> None:
    """One target, from the given moment on; it writes what each of its steps got."""
    options = ClientOptions(addresses, "budget", SETTINGS, deadline_s=DEADLINE_S, step_share=0.5, namespace=b"bench")
    numbers = [0] * NUM_ROWS
    texts = [Text(prompt_of(target, row, 0)) for row in range(NUM_ROWS)]
    steps: list[tuple[float, float, list[bool], int]] = []
    num_texts = num_wrong = 0
    last_s = None
    with contextlib.closing(draft_client(options)) as client:
        time.sleep(max(begin_s - 1.0 - time.monotonic(), 0.0))
        client.propose([])
        client.announce_prompts([text.prompt for text in texts])
        time.sleep(max(begin_s - time.monotonic(), 0.0))
        while (now_s := time.monotonic()) < begin_s + END_S:
            num_accepted = 0
            for row, text in enumerate(texts):
                num_accepted += text.verify()
                if len(text.tokens) >= PROMPT_LEN + TEXT_LEN:
                    num_texts += 1
                    num_wrong += not text.is_right()
                    numbers[row] += 1
                    texts[row] = Text(prompt_of(target, row, numbers[row]))
                    client.announce_prompts([texts[row].prompt])
                    texts[row].verify()
            call_s = time.monotonic()
            drafts = client.propose(
                [
                    SequenceUpdate(text.tokens, text.num_new, name=f"{target}.{row}.{numbers[row]}")
                    for row, text in enumerate(texts)
                ],
                None if last_s is None else call_s - last_s,
            )
            last_s = call_s
            end_s = time.monotonic()
            for text, draft in zip(texts, drafts, strict=True):
                text.draft = draft.tokens
            steps.append((end_s - begin_s, end_s - call_s, [bool(draft.tokens) for draft in drafts], num_accepted))
            time.sleep(max(now_s + TARGET_STEP_S - time.monotonic(), 0.0))
        counts = client.counts.as_dict()
    out.write_text(json.dumps({"steps": steps, "texts": num_texts, "wrong": num_wrong, "counts": counts}))


@contextlib.contextmanager
def services(directory: Path) -> Iterator[tuple[list[str], list[Child]]]:
    """Addresses and processes of services that are up."""
    addresses = [f"ipc://{directory}/{number}.sock" for number in range(NUM_SERVICES)]
    children = [start(address) for address in addresses]
    try:
        for address, child in zip(addresses, children, strict=True):
            await_service(address, child)
        yield addresses, children
    finally:
        for child in children:
            child.kill()


def start(address: str) -> Child:
    return Child([sys.executable, __file__, "--serve", address], stdin=PIPE)


def await_service(address: str, child: Child) -> None:
    with contextlib.closing(DraftClient(ClientOptions(address))) as client:
        if child.wait_until(lambda: client.hello(0.5), _START_S) is None:
            raise SystemExit(f"the draft service {child.exit_summary}")


def figures_of(address: str) -> dict[str, float]:
    """What a service says of itself."""
    with contextlib.closing(StatsClient(address, None)) as stats_client:
        stats_client.poll(5.0)
        return dict(stats_client.overview.figures) if stats_client.overview else {}


def drain(address: str) -> None:
    with contextlib.closing(MessageChannel(ZmqTransport(address))) as connection:
        connection.await_writable(5.0)
        connection.send(Drain(1))
        next(iter(connection.iter_replies(time.monotonic() + 5.0)), None)


def measure() -> dict[str, Any]:
    """The whole run, by the clock of its script."""
    source = provenance()
    with tempfile.TemporaryDirectory(prefix="specbranch-") as name, services(Path(name)) as (addresses, children):
        begin_s = time.monotonic() + 4.0
        outs = [Path(name) / f"{target}.json" for target in range(NUM_TARGETS)]
        words = ["--begin", str(begin_s), "--addresses", *addresses]
        targets = [
            Child([sys.executable, __file__, "--target", str(target), "--out", str(out), *words])
            for target, out in enumerate(outs)
        ]
        try:
            sleep_until(begin_s + KILL_S)
            spread = [figures_of(address) for address in addresses]
            killed_s = time.monotonic() - begin_s
            children[0].kill()
            sleep_until(begin_s + RESTART_S)
            children[0] = start(addresses[0])
            await_service(addresses[0], children[0])
            back_s = time.monotonic() - begin_s
            sleep_until(begin_s + DRAIN_S)
            drained_s = time.monotonic() - begin_s
            drain(addresses[1])
            before = figures_of(addresses[1])
            finished_s = await_empty(addresses[1], begin_s)
            returned = figures_of(addresses[0])
            for target in targets:
                if not target.wait(END_S + 30.0) or target.returncode:
                    raise SystemExit(f"a target {target.exit_summary}")
            after = figures_of(addresses[1])
        finally:
            for target in targets:
                target.kill()
        runs = [json.loads(out.read_text()) for out in outs]
    return {
        "provenance": source,
        "load": round(os.getloadavg()[0], 1),
        "services": NUM_SERVICES,
        "targets": NUM_TARGETS,
        "rows": NUM_ROWS,
        "draft_step_s": DRAFT_STEP_S,
        "target_step_s": TARGET_STEP_S,
        "deadline_s": DEADLINE_S,
        "texts": sum(run["texts"] for run in runs),
        "texts_changed": sum(run["wrong"] for run in runs),
        "sessions_before_kill": [round(figures["active_sessions"]) for figures in spread],
        "borrowed_tokens": round(sum(figures["borrowed_tokens"] for figures in spread)),
        "events_s": {
            "killed": round(killed_s, 2),
            "back": round(back_s, 2),
            "drained": round(drained_s, 2),
            "drained_is_idle": None if finished_s is None else round(finished_s, 2),
        },
        "opened_after_restart": round(returned["opened"]),
        "opened_while_draining": round(after["opened"] - before["opened"]),
        "gaps_s": {
            name: gaps(runs, at_s)
            for name, at_s in (("steady", killed_s / 2), ("killed", killed_s), ("drained", drained_s))
        },
        "call_ms": calls(runs),
        "counts": {name: round(sum(run["counts"][name] for run in runs), 3) for name in runs[0]["counts"]},
        "bin_s": BIN_S,
        "hits_per_s": rates(runs),
    }


def await_empty(address: str, begin_s: float) -> float | None:
    """When a drained service has no text in use any more; None if that is not before the end."""
    while time.monotonic() < begin_s + END_S - 1.0:
        figures = figures_of(address)
        if figures and not figures["active_sessions"]:
            return time.monotonic() - begin_s
        time.sleep(0.1)
    return None


def sleep_until(at_s: float) -> None:
    time.sleep(max(at_s - time.monotonic(), 0.0))


def gaps(runs: Sequence[dict[str, Any]], at_s: float) -> list[float]:
    """How long each row of each target was without a hit around a moment: median and longest."""
    found = []
    for run in runs:
        for row in range(NUM_ROWS):
            hits_s = [when_s for when_s, _, hits, _ in run["steps"] if hits[row]]
            last_s = max((hit_s for hit_s in hits_s if hit_s <= at_s), default=0.0)
            next_s = min((hit_s for hit_s in hits_s if hit_s > at_s), default=END_S)
            found.append(next_s - last_s)
    return [round(float(np.median(found)), 3), round(max(found), 3)]


def calls(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Times of all calls: median, 99th percentile, longest."""
    times_s = [call_s for run in runs for _, call_s, _, _ in run["steps"]]
    return [round(1e3 * float(value), 2) for value in np.percentile(times_s, [50, 99, 100])]


def rates(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Hits per second of all targets together, bin by bin."""
    bins = np.zeros(round(END_S / BIN_S))
    for run in runs:
        for when_s, _, hits, _ in run["steps"]:
            if when_s < END_S:
                bins[int(when_s / BIN_S)] += sum(hits)
    return [round(float(count) / BIN_S, 1) for count in bins]


def simulated() -> dict[str, Any]:
    """What the simulator says of 64 targets and ever fewer drafts: all in step, no faults, no prefill."""
    from specbranch.simulation.simulate import Layout, Method, simulate
    from specbranch.trace import read_trace

    trace = read_trace(TRACE)
    found: dict[str, Any] = {"trace": TRACE.name, "targets": 64, "c": 6.0, "row_costs": {}}
    method = Method("budget", {"cost_aware": False, "uses_text": False, "uses_memory": False})
    for row_cost in (0.02, 0.2):
        found["row_costs"][str(row_cost)] = {
            str(drafts): {
                name: round(value, 3)
                for name, value in simulate(trace, method, Layout(6.0, row_cost, sharing=64 / drafts)).as_json().items()
                if name in ("speedup", "hit_rate")
            }
            for drafts in (64, 8, 7, 4, 1)
        }
    return found


if __name__ == "__main__":
    main()
