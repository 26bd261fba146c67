"""A run to look at in a browser: one HTML file that needs nothing else, made from a timeline with its trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from specbranch.bench.timeline_file import Span, TargetLane, Timeline, TimelineError, Verdict

MAX_VERDICTS = 2000  # of one target; a browser has to hold them all

_PLACE = "/* the run */ null"


def write_replay(path: Path, timeline: Timeline, title: str, spell: Callable[[int], str]) -> None:
    """Write the page; `spell` gives the text of a token. A timeline without trees raises."""
    document = replay_document(timeline, title, spell)
    # Nothing in it may end the script that it stands in.
    data = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    page = files("specbranch.bench").joinpath("replay.html").read_text(encoding="utf-8")
    path.write_text(page.replace(_PLACE, data), encoding="utf-8")


def replay_document(timeline: Timeline, title: str, spell: Callable[[int], str]) -> dict[str, Any]:
    """What the page shows: for every target its lanes and its verdicts, and the texts of their tokens."""
    targets = [_target(lane) for lane in timeline.targets if lane.verdicts]
    if not targets:
        raise TimelineError("the timeline has no draft trees to replay: it was written by an older version")
    seen = {
        token for target in targets for one in target["verdicts"] for token in one["tokens"] + one["tree"]["tokens"]
    }
    return {
        "title": title,
        "targets": targets,
        "drafts": _spans(timeline.drafts, "rows"),
        "texts": {token: spell(token) for token in sorted(seen)},
    }


def _target(lane: TargetLane) -> dict[str, Any]:
    verdicts = sorted(lane.verdicts, key=_when)[:MAX_VERDICTS]
    return {
        "name": lane.label,
        "steps": _spans(lane.rounds, "accepted", "submitted"),
        "waits": _spans(lane.waits),
        "verdicts": [{**asdict(one), "at_s": _rounded(one.at_s)} for one in verdicts],
    }


def _spans(spans: Iterable[Span], *names: str) -> list[list[float]]:
    """Start, end and some numbers of each."""
    return [[_rounded(span.start_s), _rounded(span.end_s), *(span.args[name] for name in names)] for span in spans]


def _rounded(time_s: float) -> float:
    return round(time_s, 5)


def _when(verdict: Verdict) -> float:
    return verdict.at_s
