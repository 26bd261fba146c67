#!/usr/bin/env python
"""One prompt in real vLLM three times: without drafts, taking turns (`sps`) and with concurrent drafts (`budget`).

Writes benchmarks/timeline.json and draws docs/img/timeline-light.svg and timeline-dark.svg from it; `--draw` only draws,
`--check` only compares the files with what it would draw. The two models have one core each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbranch.bench.timeline import Mark, Timeline, TimelineTarget, TimeSpan, read_timeline
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, DecodeResult, PromptRequest, TargetProcess
from specbranch.machine import provenance
from specbranch.plugins.vllm.settings import ProposerSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.drawing import svg

RESULT = ROOT / "benchmarks" / "timeline.json"
PICTURES = {theme: ROOT / "docs" / "img" / f"timeline-{theme}.svg" for theme in svg.THEMES}
PROMPT = "Write a Python function that merges two sorted lists, and explain each line of it."
METHODS: dict[str, dict[str, Any]] = {"none": {}, "sps": {"gamma": 5}, "budget": {}}
NAMES = {"none": "vLLM without drafts", "sps": "in turns (sps)", "budget": "in parallel (budget)"}
HEADINGS = ("vLLM without drafts", "Taking turns (ordinary speculative decoding)", "SpecBranch, concurrent")
LEFT, RIGHT, TOP, LANE, BAR = 70, 594, 142, 92, 24  # pixels
PAUSE_S = 0.02  # a shorter one between two draft steps is not shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen-coder-1.5b-dense")
    parser.add_argument("--draft", default="qwen-coder-0.5b-dense")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draw", action="store_true", help="draw the kept result again")
    parser.add_argument(
        "--check", action="store_true", help="only check that the pictures are those of the kept result"
    )
    args = parser.parse_args()
    if not (args.draw or args.check):
        timeline = measure(args.target, args.draft, args.dtype, args.tokens)
        about = {"target": args.target, "draft": args.draft, "dtype": args.dtype, "provenance": provenance()}
        RESULT.write_text(json.dumps({**about, **asdict(timeline)}) + "\n")
    svg.write_or_check(pictures(), args.check)


def measure(target: str, draft: str, dtype: str, num_tokens: int) -> Timeline:
    """Every method on the same prompt, in one vLLM and with one draft service; a short run warms each up."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "timeline.json"
        options = DraftServiceOptions(draft, cores=[1], extra=["--timeline", str(file)])
        with DraftProcess(options, Path(directory) / "draft.log") as service:
            first = settings_for("none", service.address)
            arguments = {"dtype": dtype, "max_model_len": 1024, "enforce_eager": True}
            loaded = LocalEngineOptions(target, settings=first, arguments=arguments)
            with TargetProcess(loaded, Path(directory) / "target.log", [0]) as process:
                for tokens in (8, num_tokens):
                    done = {name: run(process, settings_for(name, service.address), tokens) for name in METHODS}
        timeline = read_timeline(file)
    return with_plain(timeline, done["none"])


def settings_for(name: str, address: str) -> ProposerSettings:
    return ProposerSettings(
        address=address, planner=name, settings=METHODS[name], deadline_ms=5000, namespace=name, is_gated=False
    )


def run(process: TargetProcess, settings: ProposerSettings, num_tokens: int) -> DecodeResult:
    sampling = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    return process.run(DecodeJob([PromptRequest(PROMPT, sampling, is_chat=True)], settings=settings))


def with_plain(timeline: Timeline, done: DecodeResult) -> Timeline:
    """The timeline with the steps of plain decoding, which the service does not see; its drafts are over by then."""
    offset_s = 1.0 + max(span.end_s for span in timeline.drafts)
    ends_s = [offset_s + at_s for at_s, _ in done.answers[0].steps]
    stats = {"rows": 1, "submitted": 0, "accepted": 0, "committed": 1}
    steps = [TimeSpan(start_s, end_s, stats) for start_s, end_s in pairwise(ends_s)]
    plain = TimelineTarget(NAMES["none"], steps=steps)
    lanes = {lane.planners[0]: lane for lane in timeline.targets}
    for name, lane in lanes.items():
        lane.name, lane.planners = NAMES[name], []
    return Timeline([plain, lanes["sps"], lanes["budget"]], timeline.drafts)


def timeline_of(document: dict[str, Any]) -> Timeline:
    """The timeline of a kept result."""
    lanes = [
        TimelineTarget(
            lane["name"],
            [],
            [TimeSpan(**span) for span in lane["steps"]],
            [TimeSpan(**span) for span in lane["waits"]],
            [Mark(**mark) for mark in lane["marks"]],
        )
        for lane in document["targets"]
    ]
    return Timeline(lanes, [TimeSpan(**span) for span in document["drafts"]])


def pictures() -> dict[Path, str]:
    """Return each file and what belongs into it."""
    kept = json.loads(RESULT.read_text())
    return {path: draw(kept, svg.THEMES[theme]) for theme, path in PICTURES.items()}


def draw(document: dict[str, Any], theme: Mapping[str, str]) -> str:
    """The whole of each run on one clock, which begins with the first token."""
    timeline = timeline_of(document)
    num_tokens = 1 + len(timeline.targets[0].steps)  # without drafts each later token is a step
    ends_s = [lane.steps[-1].end_s - lane.steps[0].start_s for lane in timeline.targets]
    scale = (RIGHT - LEFT) / max(ends_s)
    names = svg.model_name(document["target"]), svg.model_name(document["draft"])
    height = TOP + LANE * len(ends_s) + 42
    result = f"{num_tokens} tokens: {ends_s[0]:.0f} s without drafts, {ends_s[1]:.0f} s taking turns, {ends_s[2]:.0f} s with SpecBranch"
    body = [
        svg.text(16, 30, result, size=15.5, bold=True),
        svg.text(16, 55, f"{names[0]} ({document['dtype']}), with {names[1]} as its draft model.", "dim"),
        svg.text(
            16, 75, f"{svg.describe_cpu(document['provenance'])}; one core for each model. One prompt, one run.", "dim"
        ),
        *legend(104),
    ]
    bottom = TOP + LANE * len(ends_s) - 14
    body.append(svg.line(f"M{LEFT} {bottom}H{RIGHT}", "plain", width=1))
    for second in range(0, int(max(ends_s)) + 1, 10):
        x = LEFT + scale * second
        body.append(svg.line(f"M{x:.1f} {bottom}v5", "plain", width=1))
        body.append(svg.text(round(x, 1), bottom + 20, f"{second} s", "dim", anchor="middle"))
    body.append(
        svg.text(16, height - 12, "Time begins with the first token. All three answers came from the same vLLM.", "dim")
    )
    for index, (heading, lane) in enumerate(zip(HEADINGS, timeline.targets, strict=True)):
        body += draw_lane(TOP + LANE * index, heading, lane, timeline.drafts, scale, num_tokens)
    return svg.document(f"The same prompt three times. {result}.", height, body, theme)


def legend(y: float) -> Iterator[str]:
    """What the colors mean."""
    for x, name, words in (
        (16, "target", "target model is busy"),
        (206, "draft", "draft model is busy"),
        (392, "paper edge", "waiting"),
    ):
        yield svg.rect(x, y - 12, 16, 14, name, radius=2)
        yield svg.text(x + 23, y, words)


def draw_lane(
    y: float, heading: str, lane: TimelineTarget, drafts: Sequence[TimeSpan], scale: float, num_tokens: int
) -> Iterator[str]:
    """One run: what target and draft did, and how it ended."""
    start_s, end_s = lane.steps[0].start_s, lane.steps[-1].end_s
    yield svg.text(16, y, heading, bold=True)
    yield svg.text(svg.WIDTH - 16, y, f"{num_tokens} tokens after {end_s - start_s:.1f} s", bold=True, anchor="end")
    own = joined([span for span in drafts if span.end_s > start_s and span.start_s < end_s], start_s, end_s)
    steps = [(step.start_s, step.end_s) for step in lane.steps]
    for place, (name, spans) in enumerate((("target", steps), ("draft", own))):
        top = y + 10 + place * (BAR + 4)
        yield svg.text(16, top + 17, name, "dim")
        if not spans:
            yield svg.text(LEFT, top + 17, "no draft model; its core is not used", "dim")
            continue
        left, right = LEFT, LEFT + scale * (end_s - start_s)
        yield svg.rect(left, top, right - left, BAR, "paper edge")
        for from_s, to_s in spans:
            x, until = LEFT + scale * (from_s - start_s), LEFT + scale * (to_s - start_s)
            gap = 0.8 if name == "target" else 0.0  # between two steps
            yield svg.rect(x, top, until - x - gap, BAR, name)
        share = sum(to_s - from_s for from_s, to_s in spans) / (end_s - start_s)
        yield svg.text(round(right + 8, 1), top + 17, f"{share:.0%} busy".replace("%", " %"), "dim")


def joined(spans: Sequence[TimeSpan], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Clip spans to a time range, and join those with hardly a pause between them."""
    found = list[tuple[float, float]]()
    for span in sorted(spans, key=lambda span: span.start_s):
        from_s, to_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if found and from_s - found[-1][1] < PAUSE_S:
            from_s = found.pop()[0]
        found.append((from_s, to_s))
    return found


if __name__ == "__main__":
    main()
