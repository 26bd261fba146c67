#!/usr/bin/env python
"""Replay the flagship's traces with the guesses of trained heads, beside the other guesses and alone.

studies/08-heads/run.py [--first-share 0.033] [--more-share 0.033] [--out studies/08-heads/result.json]
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from specbranch.provenance import provenance
from specbranch.simulation.loop import DraftStep, Step
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Trace

TASKS = ("humaneval", "gsm8k", "summarization", "chat")
TARGET_MS, FIRST_MS, MORE_MS = 265, 77, 2.6  # one core each of a Xeon with AMX
NONE = {"uses_text": False, "uses_memory": False}
CASES = {  # settings, and whether the draft has heads
    "no guesses": (NONE, False),
    "heads": (NONE, True),
    "heads, submitted only": ({**NONE, "deepens": False}, True),
    "text and past answers": ({}, False),
    "text, past answers and heads": ({}, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--guesses", type=Path, default=Path(__file__).parent / "guesses.json")
    parser.add_argument("--first-share", type=float, default=0.033, help="of a first row that heads add to it")
    parser.add_argument("--more-share", type=float, default=0.033, help="of a further row that heads add to it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    plain = {task: Trace.read(args.traces / f"qwen-coder-{task}.jsonl.gz") for task in TASKS}
    guesses = json.loads(args.guesses.read_text())["guesses"]
    with_heads = {task: attached(trace, guesses[task]) for task, trace in plain.items()}
    shares = (args.first_share, args.more_share)
    found = [
        {"gamma": gamma, "guesses": name, **replay(name, traces, {"gamma": gamma, **chosen}, has_heads, shares)}
        for gamma in (8, 15)
        for name, (chosen, has_heads) in CASES.items()
        for traces in [with_heads if has_heads else plain]
    ]
    document = {"provenance": provenance(), "shares": shares, "scores": scores(plain, guesses), "replays": found}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def attached(trace: Trace, guesses: list) -> Trace:
    """The trace with what the heads guess in its distributions."""
    answers = [
        replace(
            answer,
            distributions=tuple(
                replace(distribution, guess=(token, sure))
                for distribution, (token, sure) in zip(answer.distributions, own, strict=True)
            ),
        )
        for answer, own in zip(trace.answers, guesses, strict=True)
    ]
    return replace(trace, answers=tuple(answers))


def scores(traces: dict[str, Trace], guesses: dict) -> dict:
    """How often a guess is right where the first choice before it is."""
    found = {}
    for task, trace in traces.items():
        rights = [
            own[place][0] == answer.tokens[place + 1]
            for answer, own in zip(trace.answers, guesses[task], strict=True)
            for place in range(len(answer.tokens) - 1)
            if answer.distributions[place].ids[0] == answer.tokens[place]
        ]
        found[task] = {"places": len(rights), "right": round(sum(rights) / len(rights), 3)}
    print(found, flush=True)
    return found


def replay(name: str, traces: dict[str, Trace], chosen: dict, has_heads: bool, shares: tuple[float, float]) -> dict:
    """Speeds over plain decoding by task, their geometric mean, and what a draft step gave."""
    first_ms = FIRST_MS * (1 + shares[0] * has_heads)
    more_ms = MORE_MS * (1 + shares[1] * has_heads)
    layout = Layout(TARGET_MS / first_ms, more_ms / first_ms)
    speeds, steps, emitted, rejected = {}, 0, 0, 0

    def count(step: Step) -> None:
        nonlocal steps
        steps += isinstance(step, DraftStep)

    for task, trace in traces.items():
        outcome = simulate(trace, Method("budget", chosen), layout, observe=count)
        speeds[task] = round(outcome.speedup, 3)
        emitted, rejected = emitted + outcome.stats.emitted, rejected + outcome.stats.rejected
    mean = math.exp(sum(map(math.log, speeds.values())) / len(speeds))
    found = {"mean": round(mean, 3), "tokens_per_draft_step": round(emitted / steps, 3)}
    print(chosen["gamma"], name, found, speeds, flush=True)
    return {**found, "rejected_per_token": round(rejected / emitted, 3), "speeds": speeds}


if __name__ == "__main__":
    main()
