"""The first picture of the README: one prompt in real vLLM without drafts, in turns (`sps`) and in parallel (`budget`).

Writes benchmarks/timeline.json and draws docs/img/timeline.png from it; `--draw` only draws. The two models have one
core each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbranch.bench.figures import choose_stretches, plot_timeline
from specbranch.bench.timeline import Mark, Timeline, TimelineTarget, TimeSpan, read_timeline
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, DecodeResult, PromptRequest, TargetProcess
from specbranch.machine import provenance
from specbranch.plugins.vllm.settings import ProposerSettings

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "timeline.json"
PICTURE = ROOT / "docs" / "img" / "timeline.png"
PROMPT = "Write a Python function that merges two sorted lists, and explain each line of it."
METHODS: dict[str, dict[str, Any]] = {"none": {}, "sps": {"gamma": 5}, "budget": {}}
NAMES = {"none": "vLLM without drafts", "sps": "in turns (sps)", "budget": "in parallel (budget)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen-coder-1.5b-dense")
    parser.add_argument("--draft", default="qwen-coder-0.5b-dense")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="shown of the slowest method")
    parser.add_argument("--draw", action="store_true", help="draw the kept result again")
    args = parser.parse_args()
    if not args.draw:
        timeline = measure(args.target, args.draft, args.dtype, args.tokens)
        about = {"target": args.target, "draft": args.draft, "dtype": args.dtype, "provenance": provenance()}
        RESULT.write_text(json.dumps({**about, **asdict(timeline)}) + "\n")
    document = json.loads(RESULT.read_text())
    timeline = timeline_of(document)
    title = f"{document['target']} ({document['dtype']}) with {document['draft']}, one CPU core each: the same prompt"
    plot_timeline(PICTURE, timeline, choose_stretches(timeline, args.rounds), title)


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


if __name__ == "__main__":
    main()
