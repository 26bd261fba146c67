#!/usr/bin/env python
"""Replay the flagship's traces: what each guesser gives, and whether a price on verified tokens finds the right length.

studies/07-guesses/run.py [--out studies/07-guesses/result.json]
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.costs import PairModel
from specbranch.machine import provenance
from specbranch.simulation.loop import DraftStep, Step
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Trace

TASKS = ("humaneval", "gsm8k", "summarization", "chat")
TARGET_MS, FIRST_MS, MORE_MS = 265, 77, 2.6  # one core each of a Xeon with AMX
NONE = {"uses_text": False, "uses_memory": False}
GUESSES = {
    "no guesses": NONE,
    "text, submitted only": {"uses_memory": False, "run_guesses": False},
    "text": {"uses_memory": False},
    "text and past answers": {},
}
TOKEN_COSTS = (0.0, 0.02, 0.1, 0.3, 1.0)  # of a further token in the target's step, over a step of one
# As emulated bfloat16 costs: a token 0.3 of a plain step, and a step with drafts 1.8 more; one sequence.
EMULATED = (0.3, 1.8, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--sampled", type=Path, help="directory with the traces of studies/02-budget/unseen.tar")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    traces = {task: Trace.read(args.traces / f"qwen-coder-{task}.jsonl.gz") for task in TASKS}
    guesses = [
        {"gamma": gamma, "guesses": name, **replay(traces, {"gamma": gamma, **chosen}, 0.0)}
        for gamma in (8, 15)
        for name, chosen in GUESSES.items()
    ]
    sampled = sampled_guesses(args.sampled) if args.sampled else []
    prices = [
        {"token_cost": cost, "entry": entry, "batch": batch, "gamma": gamma, "priced": is_priced, **found}
        for cost, entry, batch in [(cost, 0.0, 1) for cost in TOKEN_COSTS] + [(0.1, 0.0, 8), EMULATED]
        for gamma in (2, 4, 8, 15)
        for is_priced in (False, True)
        for found in [replay(traces, {"gamma": gamma, "cost_aware": is_priced}, cost, batch, entry)]
    ]
    document = {"provenance": provenance(), "guesses": guesses, "sampled": sampled, "prices": prices}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def sampled_guesses(directory: Path) -> list[dict]:
    """The same at temperature 1; these traces have no prompts, so guesses come from the answers alone."""
    tasks = ("humaneval", "gsm8k", "summarization", "mt-bench")
    traces = {task: Trace.read(directory / f"{task}-t1.jsonl.gz") for task in tasks}
    return [
        {"gamma": gamma, "guesses": name, **replay(traces, {"gamma": gamma, **chosen}, 0.0)}
        for gamma in (8, 15)
        for name, chosen in GUESSES.items()
    ]


class Tally(Calibration):
    """Counts, beside what it learns, how often the guesses of each source were made and right."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def observe_guess(self, grounds: Grounds, is_right: bool) -> None:
        super().observe_guess(grounds, is_right)
        self.made[grounds[0]] += 1
        self.right[grounds[0]] += is_right

    def rates(self) -> dict[str, float]:
        return {source: round(self.right[source] / made, 3) for source, made in sorted(self.made.items())}


def replay(traces: dict[str, Trace], chosen: dict, token_cost: float, batch: int = 1, entry: float = 0.0) -> dict:
    """Speeds over plain decoding and hit rates by task, the mean speed, and what a draft step gave."""
    c = TARGET_MS / FIRST_MS
    layout = Layout(c, MORE_MS / FIRST_MS, batch, token_cost=token_cost * c, entry_cost=entry * c)
    speeds, hits, steps, emitted, rejected = {}, {}, 0, 0, 0

    def count(step: Step) -> None:
        nonlocal steps
        steps += isinstance(step, DraftStep)

    for task, trace in traces.items():
        tally = Tally()
        outcome = simulate(trace, Method("budget", chosen), layout, observe=count, costs=PairModel(calibration=tally))
        speeds[task], hits[task] = round(outcome.speedup, 3), tally.rates()
        emitted, rejected = emitted + outcome.stats.emitted, rejected + outcome.stats.rejected
    mean = math.exp(sum(map(math.log, speeds.values())) / len(speeds))
    found = {"mean": round(mean, 3), "tokens_per_draft_step": round(emitted / steps, 3)}
    print(chosen, token_cost, batch, found, speeds, flush=True)
    return {**found, "rejected_per_token": round(rejected / emitted, 3), "speeds": speeds, "hit_rates": hits}


if __name__ == "__main__":
    main()
