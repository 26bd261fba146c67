#!/usr/bin/env python
"""Four simulated hours of changing traffic: the gate, drafts at all times, and no drafts at all.

First the real planner decodes made-up traces in the simulator, for every load, kind of prompt and state of the draft;
its steps are kept. Then three servers go through the same four hours step by step. Each step with drafts is one of the
kept ones, and the real gate decides which steps have drafts. The same users wait at all three servers, so that more
tokens in a minute are more speed.

benchmarks/gate_trace.py --out FILE measures, writes docs/img/gate-trace.svg and prints a summary; `--draw` only draws,
`--check` only compares the picture with what would be drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbranch.core.costs import PairModel
from specbranch.machine import provenance
from specbranch.service.client.gate import Gate
from specbranch.simulation.loop import Step, TargetStep
from specbranch.simulation.presets import ModelPair, make_trace
from specbranch.simulation.simulate import Layout, method_for, simulate
from specbranch.trace import Answer, Trace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.drawing import svg

RESULT = ROOT / "benchmarks" / "gate-trace.json"
PICTURE = ROOT / "docs" / "img" / "gate-trace.svg"
MINUTES = 240
MAX_ROWS = 64
LOADS = (1, 2, 4, 8, 16, 32, 64)
FLOOR = 0.97
POLICIES = ("gate", "always", "off")
# One that weighs what a draft token costs, and one that always sends its window, and for which the target waits.
PLANNERS = ("budget", "sps")

DRAFT_ROW_S = 0.005
C = 8.0  # a target step over a draft step
TOKEN_COST = 0.04  # of each further token in a target step, in draft steps
ROW_COST = 0.03
PATIENCE = 0.5  # of a target step: how long the client waits for a draft
DEADLINE_S = 0.1  # how long it waits for one of a planner that lets the target wait
ASKING = 0.02  # of a step: what asking for drafts takes
PREFILL_S = 0.02  # a new request, in the target or in the draft
NOISE = 0.05  # of a step's time
ANSWER_LEN = 250

ACCEPTANCE = {"code": 0.85, "chat": 0.6}
SLOWER = 10.0
# From which minute on: the state of the draft, and the kind of prompts.
SCHEDULE: tuple[tuple[float, str, str], ...] = (
    (0, "good", "code"),
    (25, "slow", "code"),
    (40, "good", "code"),
    (60, "good", "chat"),
    (75, "wrong", "chat"),
    (90, "good", "chat"),
    (105, "dead", "mixed"),
    (125, "good", "mixed"),
    (150, "wrong", "code"),
    (158, "good", "code"),
    (175, "slow", "mixed"),
    (190, "good", "mixed"),
    (205, "dead", "code"),
    (206.5, "good", "code"),
    (225, "wrong", "mixed"),
)
# The picture: what it calls the planners, and the states of the draft; pixels.
HEADINGS = {"budget": "SpecBranch's own planner (budget)", "sps": "Drafts of a fixed length (sps)"}
STATES = {"slow": "ten times slower", "wrong": "always wrong", "dead": "dead"}
LEFT, RIGHT, TOP, PANEL, STEP = 58, 684, 112, 168, 258
CLEAR = 0.03  # a way that wins by less is never called wrong
CALM_S, CALM_SHARE = 30, 0.25  # decided: so long, at most that share of the steps goes the wrong way


@dataclass(frozen=True, slots=True)
class Kept:
    """Steps of the planner, as tokens for each row and time over that of a plain step; the first show it learning."""

    steps: Sequence[tuple[float, float, bool]]

    @property
    def speed(self) -> float:
        """Tokens per second over plain decoding, once it has learned."""
        late = self.steps[len(self.steps) // 2 :]
        return sum(step[0] for step in late) / sum(step[1] for step in late)


Pools = Mapping[tuple[str, str, int], Kept]


@dataclass(slots=True)
class Run:
    """What one server did."""

    tokens: list[int]  # by minute
    wrong: list[int]  # steps that clearly went the wrong way, by second
    clear: list[int]  # steps of which that can be said, by second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=int, default=MINUTES)
    parser.add_argument("--draw", action="store_true", help="draw the kept result again")
    parser.add_argument("--check", action="store_true", help="only check that the picture is that of the kept result")
    args = parser.parse_args()
    if not (args.draw or args.check):
        document = {"provenance": provenance(), **measure(range(args.seeds), args.minutes)}
        args.out.write_text(json.dumps(document) + "\n")
    document = json.loads(args.out.read_text())
    svg.write_or_check({args.picture: draw(document)}, args.check)
    print(words(document))


def measure(seeds: Sequence[int], minutes: int, loads: Sequence[int] = LOADS) -> dict[str, Any]:
    """All planners and seeds, and a summary of each planner."""
    return {
        "minutes": minutes,
        "schedule": [change for change in SCHEDULE if change[0] < minutes],
        "planners": {planner: measure_planner(planner, seeds, minutes, loads) for planner in PLANNERS},
    }


def measure_planner(planner: str, seeds: Sequence[int], minutes: int, loads: Sequence[int]) -> dict[str, Any]:
    pools = keep_steps(planner, loads)
    runs = [go(pools, seed, minutes, max(loads)) for seed in seeds]
    return {
        "speeds": {"/".join(map(str, key)): round(kept.speed, 3) for key, kept in pools.items()},
        "seeds": runs,
        "summary": {policy: summary([run[policy] for run in runs]) for policy in ("gate", "always")},
        "decisions": decisions([run["decided_s"] for run in runs], minutes),
    }


def keep_steps(planner: str, loads: Sequence[int]) -> dict[tuple[str, str, int], Kept]:
    """The planner's steps for every state of the draft, kind and load. A dead draft has none."""
    return {
        (state, kind, load): kept
        for kind in ACCEPTANCE
        for load in loads
        for state, kept in keep(planner, kind, load).items()
    }


def keep(planner: str, kind: str, load: int) -> dict[str, Kept]:
    """The planner learns on a good draft, then goes on with a slow one, or with one that is always wrong."""
    rng = random.Random(f"{kind} {load}")
    pair, length = ModelPair(kind, C, 8, ACCEPTANCE[kind], "assumed", row_cost=ROW_COST), max(240 // load, 24)
    good, later = make_trace(pair, load, 2 * length, rng), make_trace(pair, load, length, rng)
    learned = PairModel()
    steps = decode(good, planner, load, 1.0, learned)
    anew = PairModel(calibration=deepcopy(learned.calibration))  # with a slower draft the unit of time is another
    return {
        "good": Kept(steps),
        "slow": Kept(decode(later, planner, load, SLOWER, anew)),
        "wrong": Kept(decode(wrong(later), planner, load, 1.0, learned)),
    }


def decode(trace: Trace, planner: str, load: int, slower: float, costs: PairModel) -> list[tuple[float, float, bool]]:
    """Steps of all rows with a draft that is so much slower. All times are in its steps."""
    layout = Layout(C / slower, ROW_COST, load, TOKEN_COST / slower)
    plain, steps = layout.target.at(load), list[tuple[float, float, bool]]()

    def observe(step: Step) -> None:
        if isinstance(step, TargetStep) and len(step.verdicts) == load:
            tokens = sum(1 + verdict.accepted for verdict in step.verdicts) / load
            steps.append((tokens, (step.wait_s + step.end_s - step.start_s) / plain + ASKING, any(step.submitted)))

    deadline_s = PATIENCE * plain if planner == "budget" else DEADLINE_S / DRAFT_ROW_S / slower
    pair = ModelPair(trace.header.task, C, 8, ACCEPTANCE["chat"], "assumed")
    simulate(trace, method_for(planner, pair), layout, observe=observe, costs=costs, deadline_s=deadline_s)
    return steps


def wrong(trace: Trace) -> Trace:
    """The draft is as sure as before, but the target never says what it thinks."""
    return replace(trace, answers=tuple(Answer((0,) * len(one.tokens), one.distributions) for one in trace.answers))


def users(seed: int, minutes: int, most: int = MAX_ROWS) -> list[int]:
    """How many requests are answered together, by second: a day in four hours, with bursts and quiet spells."""
    rng = random.Random(f"users {seed}")
    bursts = [(rng.randrange(minutes * 60), rng.randint(30, 180), rng.randint(-40, 40)) for _ in range(minutes // 8)]
    found, wander = [], 0.0
    for second in range(minutes * 60):
        wander = 0.995 * wander + rng.gauss(0, 0.4)
        day = 22 * (1 - math.cos(2 * math.pi * second / (MINUTES * 60)))
        burst = sum(size for start, length, size in bursts if start <= second < start + length)
        found.append(min(max(round(day + wander + burst), 0), most))
    return found


def situations(minutes: int) -> list[tuple[str, str]]:
    """The draft's state and the kind of prompts, by second."""
    return [
        next((state, kind) for start, state, kind in reversed(SCHEDULE) if 60 * start <= second)
        for second in range(60 * minutes)
    ]


def go(pools: Pools, seed: int, minutes: int, most: int) -> dict[str, Any]:
    """All policies through the same hours."""
    load = users(seed, minutes, most)
    runs = {policy: Server(pools, load, situations(minutes), seed, policy).run() for policy in POLICIES}
    changes = [60 * start for start, _, _ in SCHEDULE if start < minutes]
    ends = [*changes[1:], 60 * minutes]
    decided_s = [settled_s(runs["gate"], int(start), int(end)) for start, end in zip(changes, ends, strict=True)]
    by_minute = [load[start : start + 60] for start in range(0, len(load), 60)]
    busy = [minute for minute, during in enumerate(by_minute) if min(during) > 0]
    found: dict[str, Any] = {"users": [round(statistics.fmean(during), 1) for during in by_minute]}
    for policy in ("gate", "always"):
        own, off = runs[policy].tokens, runs["off"].tokens
        ratios = [round(own[minute] / off[minute], 4) if minute in busy else None for minute in range(minutes)]
        total = sum(own[minute] for minute in busy) / max(sum(off[minute] for minute in busy), 1)
        found[policy] = {"ratio": total, "by_minute": ratios}
    return {**found, "decided_s": decided_s}


class Server:
    """One server, which goes through the hours step by step."""

    def __init__(
        self, pools: Pools, load: Sequence[int], during: Sequence[tuple[str, str]], seed: int, policy: str
    ) -> None:
        self._pools = pools
        self._gains = gains(pools)
        self._users, self._during = load, during
        self._drift = [1 + 0.04 * math.sin(second / 97 + seed) for second in range(len(load))]
        self._rng = random.Random(f"{policy} {seed}")
        self._gate = Gate() if policy == "gate" else None
        self._is_open = policy == "always"
        self._opened_s = 0.0
        self._place = 0  # among the kept steps, since the last change
        self._is_lagging = False  # nobody waits for a draft that did not answer

    def run(self) -> Run:
        seconds = len(self._users)
        run = Run([0] * (seconds // 60), [0] * seconds, [0] * seconds)
        rows, now_s, last = 0, 0.0, self._during[0]
        while now_s < seconds:
            second = int(now_s)
            came = max(self._users[second] - rows, 0)
            is_same = rows == self._users[second]
            rows = self._users[second]
            if not rows:
                now_s = second + 1.0
                continue
            state, kind = situation = self._during[second]
            if situation != last:
                last, self._place = situation, 0
                self._is_lagging &= state == "dead"
            load = 1 << (rows - 1).bit_length()
            is_open = self._ask(rows, now_s)
            tokens, times, has_drafts = self._step(
                state, kind, load, is_open and now_s >= self._opened_s + PREFILL_S * rows
            )
            noise = 1 + NOISE * self._rng.gauss(0, 1)
            step_s = plain_s(rows) * times * self._drift[second] * noise + came * PREFILL_S
            now_s += step_s
            num_tokens = round(rows * tokens)
            run.tokens[second // 60] += num_tokens
            gain = self._gains.get((state, kind, load), 1.0)
            if not 1 - CLEAR < gain < 1 + CLEAR:
                run.clear[second] += 1
                run.wrong[second] += is_open != (gain > 1)
            if self._gate and is_same:
                self._gate.observe(rows, num_tokens, step_s, has_drafts)
            if self._rng.random() < num_tokens / ANSWER_LEN:
                rows -= 1  # another takes its place
        return run

    def _ask(self, rows: int, now_s: float) -> bool:
        if self._gate:
            was_open, self._is_open = self._is_open, self._gate.is_open(rows)
            if self._is_open and not was_open:
                self._opened_s = now_s
        return self._is_open

    def _step(self, state: str, kind: str, load: int, has_read: bool) -> tuple[float, float, bool]:
        """Tokens for each row, time over that of a plain step, and whether it had drafts."""
        if not has_read:
            return 1.0, 1.0, False
        if state == "dead":
            wait, self._is_lagging = 0.0 if self._is_lagging else PATIENCE, True
            return 1.0, 1.0 + wait + ASKING, False
        if kind == "mixed":
            kind = "code" if self._rng.random() < 0.5 else "chat"
        steps = self._pools[state, kind, load].steps
        place = self._place if self._place < len(steps) else -1 - int(self._rng.random() * len(steps) / 2)
        self._place += 1
        return steps[place]


def plain_s(rows: int) -> float:
    """The time of a step without drafts."""
    return DRAFT_ROW_S * (C + TOKEN_COST * (rows - 1))


def gains(pools: Pools) -> dict[tuple[str, str, int], float]:
    """What drafts give; where all kinds come alike, that of their steps in turn."""
    found = {key: kept.speed for key, kept in pools.items()}
    for state, _, load in pools:
        found[state, "mixed", load] = statistics.fmean(found[state, kind, load] for kind in ACCEPTANCE)
    return found


def settled_s(run: Run, start: int, end: int) -> int | None:
    """Busy seconds after a change until nearly all steps go the right way; None if it does not matter how they go."""
    busy = [second for second in range(start, end) if run.clear[second]]
    for index in range(len(busy)):
        after = busy[index : index + CALM_S]
        if sum(run.wrong[second] for second in after) <= CALM_SHARE * sum(run.clear[second] for second in after):
            return index
    return len(busy) or None


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the whole, the worst minute, and how many minutes are below the floor."""
    minutes = [ratio for run in runs for ratio in run["by_minute"] if ratio is not None]
    return {
        "ratio": round(statistics.fmean(run["ratio"] for run in runs), 4),
        "lowest_ratio": round(min(run["ratio"] for run in runs), 4),
        "worst_minute": min(minutes),
        "share_below": round(sum(ratio < FLOOR for ratio in minutes) / len(minutes), 4),
    }


def decisions(by_seed: Sequence[Sequence[int | None]], minutes: int) -> list[dict[str, Any]]:
    """Busy seconds until the right decision after each change, over all seeds; only where the way matters."""
    found = []
    for index, (start, state, kind) in enumerate(change for change in SCHEDULE if change[0] < minutes):
        known = [run[index] for run in by_seed if run[index] is not None]
        if known:
            times = {"median_s": statistics.median(known), "worst_s": max(known)}
            found.append({"minute": start, "state": state, "kind": kind, **times})
    return found


def words(document: Mapping[str, Any]) -> str:
    lines = []
    for planner, found in document["planners"].items():
        for policy, one in found["summary"].items():
            lines.append(
                f"{planner}, {policy}: {one['ratio']:.3f} of off, worst minute {one['worst_minute']:.3f}, "
                f"{one['share_below']:.1%} of the minutes below {FLOOR}"
            )
        lines += [
            f"  minute {one['minute']}: {one['state']}, {one['kind']}: right after {one['median_s']} s, at worst "
            f"{one['worst_s']} s"
            for one in found["decisions"]
        ]
    return "\n".join(lines)


def draw(document: Mapping[str, Any]) -> str:
    """Each planner's speed over no drafts in the first seed, by minute, with the state of the draft behind it."""
    own = next(iter(document["planners"].values()))["summary"]["gate"]
    worst = f"{own['worst_minute']:.2f}"
    title = f"SpecBranch's planner: even the worst minute has {worst} of plain speed"
    num_panels = len(document["planners"])
    height = TOP + STEP * num_panels + 70
    body = [
        svg.text(16, 30, title, size=15.5, bold=True),
        svg.text(16, 54, "Speed with drafts over speed without, each minute of four hours of changing", "dim"),
        svg.text(16, 74, "traffic. A switch turns drafts off where they do not help. Simulated step times.", "dim"),
    ]
    for index, (planner, found) in enumerate(document["planners"].items()):
        body += draw_planner(TOP + STEP * index, planner, found, document)
    body += draw_legend(height - 64, document["minutes"], len(next(iter(document["planners"].values()))["seeds"]))
    return svg.document(f"{title}, in a simulation", height, body)


def draw_planner(top: float, planner: str, found: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """One planner: heading, what the colors are, bands of states, axes, and both curves."""
    minutes, run = document["minutes"], found["seeds"][0]
    ratios = [one for policy in ("gate", "always") for one in run[policy]["by_minute"] if one is not None]
    highest = max(math.ceil(2 * max(ratios)) / 2, 1.5)
    base, scale = top + 56 + PANEL, PANEL / highest
    yield svg.text(16, top, HEADINGS[planner], size=15, bold=True)
    yield from draw_key(top + 24, found["summary"])
    ends = [*(change[0] for change in document["schedule"][1:]), minutes]
    for (start, state, _), end in zip(document["schedule"], ends, strict=True):
        if state != "good":
            x = across(start, minutes)
            yield svg.rect(x, top + 40, across(end, minutes) - x, base - top - 40, state)
    for tick in range(math.floor(highest) + 1):
        y = base - scale * tick
        dots = "" if tick in (0, 1) else ' stroke-dasharray="2 4"'
        yield svg.line(f"M{LEFT} {y:.1f}H{RIGHT}", "dim" if tick in (0, 1) else "plain", width=1, extra=dots)
        yield svg.text(LEFT - 8, round(y + 5, 1), "same" if tick == 1 else f"{tick}x", "dim", anchor="end")
    for policy, name, width in (("always", "bad", 1.6), ("gate", "target", 2.2)):
        yield svg.line(
            curve(run[policy]["by_minute"], minutes, base, scale), name, width=width, extra=' stroke-linejoin="round"'
        )


def draw_key(y: float, summary: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What the two curves are, with their figures."""
    for x, policy, name, words_ in (
        (16, "gate", "target", "with the switch"),
        (366, "always", "bad", "always drafting"),
    ):
        one = summary[policy]
        yield svg.line(f"M{x} {y - 5}h20", name, width=4)
        yield svg.text(x + 28, y, f"{words_}: {one['ratio']:.2f}x, worst {one['worst_minute']:.2f}x")


def draw_legend(y: float, minutes: int, num_runs: int) -> Iterator[str]:
    """The hours below the last panel, and what the bands mean."""
    for hour in range(minutes // 60 + 1):
        anchor = "end" if 60 * hour == minutes else "middle"
        yield svg.text(round(across(60 * hour, minutes), 1), y - 16, f"{hour} h", "dim", anchor=anchor)
    yield svg.text(16, y + 20, "Draft model:", "dim")
    x = 116.0
    for state, words_ in STATES.items():
        yield svg.rect(x, y + 8, 16, 14, f"{state} edge", radius=2)
        yield svg.text(x + 23, y + 20, words_, "dim")
        x += 42 + 8.3 * len(words_)
    yield svg.rect(x, y + 8, 16, 14, "paper edge", radius=2)
    yield svg.text(round(x + 23, 1), y + 20, "good", "dim")
    yield svg.text(
        16, y + 46, f"Curves: one of {num_runs} simulated runs. Figures: all of them. Gaps: no requests.", "dim"
    )


def across(minute: float, minutes: int) -> float:
    """Where a minute stands."""
    return LEFT + (RIGHT - LEFT) * minute / minutes


def curve(ratios: Sequence[float | None], minutes: int, base: float, scale: float) -> str:
    """The path of a curve, with gaps where there is no ratio."""
    path, is_drawing = "", False
    for minute, ratio in enumerate(ratios):
        if ratio is not None:
            path += f"{'L' if is_drawing else 'M'}{across(minute + 0.5, minutes):.0f} {base - scale * ratio:.1f}"
        is_drawing = ratio is not None
    return path


if __name__ == "__main__":
    main()
