"""The report of a proof: one Markdown file that a person can read, with everything as JSON at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.proof.plan import BARE, EXACT, OURS
from tests.proof.stages import Outcome

FENCE = "```"


def judge(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Whether our answers are those of bare vLLM, token by token, where the data type allows to ask."""
    found = {outcome.name: outcome.result for outcome in outcomes if outcome.result is not None}
    for ending in (EXACT, ""):
        bare, ours = found.get(BARE + ending), found.get(OURS + ending)
        if bare is not None and ours is not None and bare["dtype"] == ours["dtype"] == "float32":
            pairs = [pair for batch in bare["runs"] for pair in _pairs(bare["runs"][batch], ours["runs"][batch])]
            accepted = sum(run["accepted"] for run in ours["runs"].values())
            num_equal = sum(one == other for one, other in pairs)
            holds = accepted > 0 and num_equal == len(pairs)
            return {"holds": holds, "answers": len(pairs), "equal": num_equal, "accepted": accepted}
    return {"holds": False, "why": "there are no two runs in float32 to compare"}


def text(document: Mapping[str, Any]) -> str:
    """The whole report."""
    stages = {stage["name"]: stage for stage in document["stages"]}
    lines = ["# Proof on a GPU", "", document["summary"], "", *_stage_table(stages.values()), "", *_speed_table(stages)]
    lines += ["", *_engine_lines(stages)]
    for stage in stages.values():
        if stage["why"]:
            lines += [
                "",
                f"## {stage['name']}: {stage['ending']}",
                "",
                FENCE,
                stage["why"].replace(FENCE, "'''"),
                FENCE,
            ]
    return "\n".join([*lines, "", "## All figures", "", f"{FENCE}json", json.dumps(document, indent=1), FENCE, ""])


def read(page: str) -> dict[str, Any]:
    """The document at the end of a report."""
    found: dict[str, Any] = json.loads(page.rpartition(f"{FENCE}json\n")[2].rpartition(FENCE)[0])
    return found


def summary(outcomes: Sequence[Outcome], equality: Mapping[str, Any]) -> str:
    """The report in one line."""
    num_passed = sum(outcome.ending == "passed" for outcome in outcomes)
    if "why" in equality:
        exact = f"equality with bare vLLM: {equality['why']}"
    else:
        exact = f"{equality['equal']} of {equality['answers']} answers equal bare vLLM's in float32"
        exact += f", with {equality['accepted']} draft tokens accepted"
    return f"{num_passed} of {len(outcomes)} stages passed; {exact}."


def _pairs(bare: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    return list(zip(bare["answers"], ours["answers"], strict=True))


def _stage_table(stages: Any) -> list[str]:
    rows = [f"| {stage['name']} | {stage['ending']} | {stage['took_s']:.0f} |" for stage in stages]
    return ["| stage | ended | seconds |", "|---|---|---|", *rows]


def _speed_table(stages: Mapping[str, Any]) -> list[str]:
    """Every method over bare vLLM in the same data type, for each number of requests at once."""
    head = ["| method | at once | tokens/s | over bare | step ms | hook ms | accepted | same |", f"|{'---|' * 8}"]
    rows = []
    for name, stage in stages.items():
        if not stage["result"] or "runs" not in stage["result"]:
            continue
        reference = (stages[BARE + (EXACT if name.endswith(EXACT) else "")]["result"] or {}).get("runs", {})
        for batch, run in stage["result"]["runs"].items():
            bare = reference.get(batch)
            over = f"{run['tokens_per_s'] / bare['tokens_per_s']:.2f}" if bare else "-"
            same = f"{sum(a == b for a, b in _pairs(bare, run))}/{len(run['answers'])}" if bare else "-"
            share = f"{run['accepted'] / run['submitted']:.0%}" if run["submitted"] else "-"
            times = [_number(run["step_ms"]), _number(run["hook_ms"])]
            cells = [name, batch, f"{run['tokens_per_s']:.1f}", over, *times, share, same]
            rows.append(f"| {' | '.join(cells)} |")
    return [*head, *rows] if rows else []


def _engine_lines(stages: Mapping[str, Any]) -> list[str]:
    """What the draft's engine did on its device: how it runs its steps, whether it conforms, and what a step takes."""
    suite, profile = (stages.get(name, {}).get("result") for name in ("engine", "profile"))
    lines = [f"- {name}: {said}" for name, said in suite["noted"].items() if said] if suite else []
    if suite:
        lines.append(f"- conformance: {suite['passed']} tests passed, failed: {', '.join(suite['failed']) or 'none'}")
    if profile:
        rows = ", ".join(f"{rows}: {spread['median_ms']:.2f}" for rows, spread in profile["rows"].items())
        lines.append(f"- {profile['engine']} on {profile['device']} in {profile['dtype']}, ms by rows: {rows}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
