"""Timeline files: read them, summarize them, and write a page that replays them in a browser.

This module knows only the file's format; `service/server/timeline_recorder.py` writes such files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from specbranch.bench.results import describe_file
from specbranch.errors import SpecBranchError

_MAX_NUMBER = 10**15  # of microseconds, which is about thirty years, or of anything counted
MAX_VERDICTS = 2000  # of one target, because the browser must hold them all
_PLACE = "/* the run */ null"


class TimelineError(SpecBranchError, ValueError):
    """A file is not a timeline, has no draft trees to replay, or has no work of a target in a time range."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A period in which a target or the draft worked, or a target waited.

    `args` has the values that the service recorded for it, by name, such as `rows` and `accepted` for a target's step.
    """

    start_s: float
    end_s: float
    args: dict[str, Any]

    @property
    def is_prefill(self) -> bool:
        """Whether the device prefilled in this period; a target may also have been idle in a part of it."""
        return bool(self.args.get("is_prefill"))


@dataclass(frozen=True, slots=True)
class Mark:
    """How many of a target's sequences (`rows`) had a hit, or how many had a miss, in the verdicts of one step.

    A hit: before the verdict came, the draft had computed its distribution after the last committed token.
    """

    at_s: float
    rows: int
    is_hit: bool


@dataclass(frozen=True, slots=True)
class TimelineVerdict:
    """One verdict on one sequence: the committed tokens, the number of submitted ones, and the draft tree before it.

    `tree` has the lists `parents`, `tokens`, `percents` and `marks`, each with an entry for every node, as in
    `TreeSnapshot`. `is_hit` is None if the sequence got no drafts.
    """

    at_s: float
    session: int
    tokens: list[int]
    submitted: int
    is_hit: bool | None
    tree: dict[str, list[int]]


@dataclass(slots=True)
class TimelineTarget:
    """The events of one target, as the service recorded them."""

    name: str
    planners: list[str] = field(default_factory=list)
    steps: list[TimeSpan] = field(default_factory=list)
    waits: list[TimeSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    verdicts: list[TimelineVerdict] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The target's name, followed by the names of the planners that drafted for it."""
        return f"{self.name}: {', '.join(self.planners)}" if self.planners else self.name

    @property
    def rounds(self) -> list[TimeSpan]:
        """The steps that verified or decoded tokens, without steps that only prefilled new sequences."""
        return [step for step in self.steps if not step.is_prefill]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The contents of a timeline file: all targets and the draft's steps, with times in seconds since the first event.

    `is_cut`: the run had more events than were recorded. `draft` is the draft model's name on the service's command
    line; None if the file does not have it.
    """

    targets: list[TimelineTarget]
    drafts: list[TimeSpan]
    is_cut: bool = False
    draft: str | None = None

    def between(self, start_s: float, end_s: float) -> Timeline:
        """Return the timeline of a time range: clip spans to it, and leave out targets without rounds or waits in it.

        Raise `TimelineError` if no target is left.
        """
        targets = [
            TimelineTarget(
                lane.name,
                lane.planners,
                _clip(lane.steps, start_s, end_s),
                _clip(lane.waits, start_s, end_s),
                [mark for mark in lane.marks if start_s <= mark.at_s <= end_s],
                [verdict for verdict in lane.verdicts if start_s <= verdict.at_s <= end_s],
            )
            for lane in self.targets
        ]
        targets = [lane for lane in targets if lane.rounds or lane.waits]
        if not targets:
            raise TimelineError(
                f"no target worked between {start_s:g} s and {end_s:g} s; choose another range with --from and --to"
            )
        return replace(self, targets=targets, drafts=_clip(self.drafts, start_s, end_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The shares of one target's time in which it worked, it waited, and the draft worked; and means over its rounds.

    The time `time_s` runs from the target's first round or wait to its last, without prefill and idle time. `busy`,
    `waiting` and `draft_busy` are shares of it. In `rounds`, each sequence of a step counts as one round.
    """

    target: str
    time_s: float
    busy: float
    waiting: float
    draft_busy: float
    rounds: int
    hit_rate: float
    accepted_per_round: float
    emitted_per_round: float
    rows_per_draft_step: float

    def as_json(self) -> dict[str, Any]:
        """Return the shares as a JSON dict."""
        return {name: getattr(self, name) for name in self.__slots__}


def read_timeline(path: Path) -> Timeline:
    """Read a timeline file and return it; raise `TimelineError`, which names the file's kind, for any other file."""
    try:
        document = json.loads(path.read_bytes())
        about = document.get("otherData", {})
        timeline = _timeline_of(document["traceEvents"])
        return replace(timeline, is_cut=bool(about.get("is_cut")), draft=about.get("draft"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TimelineError(
            f"{path} is not a timeline: it is {_found(path)}; `serve`, `generate` and `draft` write one with --timeline"
        ) from error


def _found(path: Path) -> str:
    kind = describe_file(path)
    return "a damaged timeline" if kind.startswith("a timeline") else kind


def time_shares(timeline: Timeline, lane: TimelineTarget) -> Shares:
    """Return the shares of time that the target `lane` of a timeline worked and waited, and means over its rounds."""
    rounds = lane.rounds
    spans = sorted(rounds + lane.waits, key=lambda span: span.start_s)
    pauses = [step for step in lane.steps if step.is_prefill]
    stretch = [TimeSpan(spans[0].start_s, spans[-1].end_s, {})] if spans else []
    time_s = _length_s(stretch) - shared_s(pauses, stretch)
    drafts = _clip(timeline.drafts, stretch[0].start_s, stretch[0].end_s) if stretch else []
    draft_s = _length_s(drafts) - shared_s(pauses, drafts)
    verdicts = sum(mark.rows for mark in lane.marks)
    num_rounds = sum(step.args["rows"] for step in rounds)
    return Shares(
        target=lane.label,
        time_s=time_s,
        busy=_ratio(_length_s(rounds), time_s),
        waiting=_ratio(_length_s(lane.waits), time_s),
        draft_busy=_ratio(draft_s, time_s),
        rounds=num_rounds,
        hit_rate=_ratio(sum(mark.rows for mark in lane.marks if mark.is_hit), verdicts),
        accepted_per_round=_ratio(sum(step.args["accepted"] for step in rounds), num_rounds),
        emitted_per_round=_ratio(sum(step.args["committed"] for step in rounds), num_rounds),
        rows_per_draft_step=_ratio(sum(draft.args["rows"] for draft in drafts), len(drafts)),
    )


def shared_s(some: Sequence[TimeSpan], others: Sequence[TimeSpan]) -> float:
    """Return the seconds that spans of both lists cover; each list must be sorted, and its spans must not overlap."""
    total_s, first, second = 0.0, 0, 0
    while first < len(some) and second < len(others):
        one, other = some[first], others[second]
        total_s += max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))
        if one.end_s < other.end_s:
            first += 1
        else:
            second += 1
    return total_s


def _timeline_of(events: Iterable[dict[str, Any]]) -> Timeline:
    names: dict[int, str] = {}
    lanes: dict[str, TimelineTarget] = {}
    drafts: list[TimeSpan] = []
    for event in events:
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        elif event["cat"] == "draft":
            drafts.append(_span(event, "rows"))
        else:
            name = names[event["tid"]].replace("wait", "target")
            _add_event(lanes.setdefault(name, TimelineTarget(name)), event)
    drafts.sort(key=lambda span: span.start_s)
    return Timeline(list(lanes.values()), drafts)


def _add_event(lane: TimelineTarget, event: dict[str, Any]) -> None:
    kind, args = event["cat"], event["args"]
    if kind == "step":
        lane.steps.append(_span(event, "rows", "submitted", "accepted", "committed"))
    elif kind == "wait":
        lane.waits.append(_span(event))
    elif kind in ("hit", "miss"):
        lane.marks.append(Mark(_seconds(event["ts"]), _count(args["rows"]), kind == "hit"))
    elif kind == "verdict":
        lane.verdicts.append(_verdict(_seconds(event["ts"]), **args))
    elif kind == "open" and str(args["planner"]) not in lane.planners:
        lane.planners.append(str(args["planner"]))


def _verdict(
    at_s: float, session: Any, tokens: Any, submitted: Any, is_hit: Any, tree: dict[str, list[Any]]
) -> TimelineVerdict:
    if is_hit not in (True, False, None) or set(tree) != {"parents", "tokens", "percents", "marks"}:
        raise ValueError("this is not a verdict")
    nodes = {name: [_count(value) for value in values] for name, values in tree.items()}
    if len({len(values) for values in nodes.values()}) > 1 or any(
        parent > number for number, parent in enumerate(nodes["parents"])
    ):
        raise ValueError("this is not a tree")
    return TimelineVerdict(at_s, _count(session), [_count(token) for token in tokens], _count(submitted), is_hit, nodes)


def _span(event: dict[str, Any], *counts: str) -> TimeSpan:
    """Return an event as a span; raise an error if its times, or its values named in `counts`, are not valid."""
    start_s, args = _seconds(event["ts"]), event["args"]
    return TimeSpan(
        start_s, start_s + _seconds(event["dur"]), {**args, **{name: _count(args[name]) for name in counts}}
    )


def _seconds(microseconds: Any) -> float:
    if not isinstance(microseconds, int | float) or not 0 <= microseconds < _MAX_NUMBER:
        raise ValueError(f"{microseconds!r} is not a time")
    return microseconds / 1e6


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{value!r} is not a count")
    return value


def _clip(spans: Sequence[TimeSpan], start_s: float, end_s: float) -> list[TimeSpan]:
    return [
        span
        if start_s <= span.start_s and span.end_s <= end_s
        else replace(span, start_s=max(span.start_s, start_s), end_s=min(span.end_s, end_s))
        for span in spans
        if span.start_s < end_s and span.end_s > start_s
    ]


def _length_s(spans: Iterable[TimeSpan]) -> float:
    return math.fsum(span.end_s - span.start_s for span in spans)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def write_replay(path: Path, timeline: Timeline, title: str, spell: Callable[[int], str]) -> None:
    """Write an HTML page to `path` that replays the timeline in a browser; `spell` returns the text of a token id.

    Raise `TimelineError` for a timeline without draft trees.
    """
    document = replay_document(timeline, title, spell)
    # The data must not end the script element that contains it.
    data = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    page = files("specbranch.bench").joinpath("replay.html").read_text(encoding="utf-8")
    path.write_text(page.replace(_PLACE, data), encoding="utf-8")


def replay_document(timeline: Timeline, title: str, spell: Callable[[int], str]) -> dict[str, Any]:
    """Return the replay page's data: steps, waits and verdicts of each target, the draft's steps, each token's text.

    `spell` returns the text of a token id. Raise `TimelineError` for a timeline without draft trees.
    """
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


def _target(lane: TimelineTarget) -> dict[str, Any]:
    verdicts = sorted(lane.verdicts, key=lambda verdict: verdict.at_s)[:MAX_VERDICTS]
    return {
        "name": lane.label,
        "steps": _spans(lane.rounds, "accepted", "submitted"),
        "waits": _spans(lane.waits),
        "verdicts": [{**asdict(one), "at_s": round(one.at_s, 5)} for one in verdicts],
    }


def _spans(spans: Iterable[TimeSpan], *names: str) -> list[list[float]]:
    """Return for each span a list: its start and its end in seconds, and the values of `names` in its `args`."""
    return [[round(span.start_s, 5), round(span.end_s, 5), *(span.args[name] for name in names)] for span in spans]
