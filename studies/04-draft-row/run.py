#!/usr/bin/env python3
"""How well drafts agree with a target on answers that were collected, what their rows cost, and what both are worth.

Agreement is how often the draft's first choice is the target's token, and, if the target is named, the overlap of both
distributions (1 - TV, of their heads) too. Rows are timed in turns, so that the machine's noise hits all drafts alike. The worth
is the simulated speed of `budget` on these answers. Answers come from `specbranch train collect`. Writes
result.json, or rows.json where only rows are timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from specbranch.bench.profile import measure
from specbranch.bench.survey import record_distributions
from specbranch.core.distribution import Distribution
from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.registry import engine_for, open_engine
from specbranch.hrad.examples import read_answers, split_of
from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Trace

HERE = Path(__file__).parent
ROWS = (1, 4, 8, 16)
TARGET_MS = 220.0  # a step of the flagship target in a quiet hour


def main() -> None:
    args = _arguments()
    os.sched_setaffinity(0, {args.core})
    by_task, others = _answers(args)
    truth: dict[str, Trace] = {}
    if args.target and by_task:
        engine = _opened(args.target)
        truth = {task: record_distributions(engine, pairs) for task, pairs in by_task.items()}
        engine.shutdown()
    engines = {draft: _opened(draft) for draft in args.drafts}
    traces: dict[str, dict[str, Trace]] = {}
    for draft, engine in engines.items():
        if engine_for(draft.partition("@")[0]) == "torch":
            _read(engine, others[:: max(1, len(others) // args.others)])
        traces[draft] = {task: record_distributions(engine, pairs) for task, pairs in by_task.items()}
    rows = []
    for draft, by_rows in _timed(engines, args.turns).items():
        rows.append({"draft": draft, **_judged(traces[draft], truth, by_rows)})
        print(rows[-1], flush=True)
    for engine in engines.values():
        engine.shutdown()
    out = args.out or HERE / ("rows.json" if args.rows_only else "result.json")
    out.write_text(json.dumps({"drafts": rows, "provenance": provenance()}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", help="MODEL, or MODEL@DTYPE")
    parser.add_argument("--target", help="a model of Transformers")
    parser.add_argument("--collection", type=Path, required=True, help="directory of `specbranch train collect`")
    parser.add_argument("--count", type=int, default=4, help="answers of each task")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--longest", type=int, default=200, help="prompts with more tokens are left out")
    parser.add_argument("--others", type=int, default=48, help="other answers that the output layer learns from first")
    parser.add_argument("--rows-only", action="store_true", help="time rows, and leave agreement and worth out")
    parser.add_argument("--turns", type=int, default=5, help="turns of timing")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _answers(args: argparse.Namespace) -> tuple[dict[str, list[tuple[list[int], list[int]]]], list[list[int]]]:
    """Prompts and answers to judge by, for each task; and whole sequences of other prompts."""
    by_task: dict[str, list[tuple[list[int], list[int]]]] = {}
    others: list[list[int]] = []
    for task, prompt, answer in read_answers(args.collection):
        match split_of(prompt):
            case "train":
                others.append([*answer.prompt, *answer.tokens])
            case "test" if not args.rows_only and len(answer.prompt) <= args.longest:
                by_task.setdefault(task, []).append((list(answer.prompt), list(answer.tokens[: args.tokens])))
    return {task: pairs[: args.count] for task, pairs in by_task.items()}, others


def _judged(traces: dict[str, Trace], truth: dict[str, Trace], by_rows: dict[int, float]) -> dict[str, Any]:
    """A draft's agreement by task, the times of its rows, and the speed that `budget` would have with both."""
    agreement = {
        task: {
            "tokens": trace.num_tokens,
            "greedy": round(trace.match_share(), 4),
            **({"overlap": round(_overlap(trace, truth[task]), 4)} if truth else {}),
        }
        for task, trace in traces.items()
    }
    layout = Layout(TARGET_MS / by_rows[1], max(0.0, by_rows[8] / by_rows[1] - 1) / 7)
    speeds = {task: simulate(trace, Method("budget"), layout).speedup for task, trace in traces.items()}
    worth = {task: round(speed, 2) for task, speed in speeds.items()}
    return {"agreement": agreement, "row_ms": by_rows, "speed": worth}


def _opened(draft: str) -> DraftEngine:
    model, _, dtype = draft.partition("@")
    return open_engine(engine_for(model), EngineOptions(model, threads=1, dtype=dtype or "auto"))


def _timed(engines: dict[str, DraftEngine], num_turns: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a step by its rows: the median of turns in which every engine has its own."""
    found: dict[str, dict[int, list[float]]] = {draft: {count: [] for count in ROWS} for draft in engines}
    for _ in range(num_turns):
        for draft, engine in engines.items():
            for count, spread in measure(engine, ROWS, 256, 3).by_rows.items():
                found[draft][count].append(1e3 * spread.median_s)
    return {
        draft: {count: round(median(times), 1) for count, times in by_rows.items()} for draft, by_rows in found.items()
    }


def _overlap(draft: Trace, target: Trace) -> float:
    pairs = zip(_distributions(draft), _distributions(target), strict=True)
    return mean(_shared(one, other) for one, other in pairs)


def _distributions(trace: Trace) -> Sequence[Distribution]:
    return [distribution for answer in trace.answers for distribution in answer.distributions]


def _shared(one: Distribution, other: Distribution) -> float:
    other_probs = dict(zip(other.ids, other.probs, strict=True))
    return sum(
        min(float(prob), float(other_probs.get(token, 0.0))) for token, prob in zip(one.ids, one.probs, strict=True)
    )


def _read(engine: DraftEngine, texts: list[list[int]]) -> None:
    """Let an engine see some traffic first, of prompts that are not asked later: its output layer learns from it."""
    for text in texts:
        handle = engine.open()
        engine.run([Row(handle, tuple(text))])
        engine.close(handle)


if __name__ == "__main__":
    main()
