"""What a draft service, or a vLLM server with our proposer, says of itself at one moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specbranch.core.round import Stats
from specbranch.core.tree import CAUSES
from specbranch.service.client.stats import Sample
from specbranch.service.wire.messages import PREFIX, REASONS, Overview

_OF_VLLM = "specbranch_"
_OWN_LABELS = ("cause", "reason")  # all others tell engines apart, whose figures are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters since the start and, without them, what is true now. None is what the source does not tell.

    `wait_s` of the stats is the time that targets waited, and `target_steps` the steps in which they could.
    """

    at_s: float
    model: str  # of the draft or, from vLLM, of the target
    stats: Stats
    target_steps: int
    draft_steps: int | None = None
    draft_step_s: float | None = None
    undrafted: int = 0
    faults: int = 0
    sessions: int = 0
    active_sessions: int | None = None
    waiting_rows: int | None = None
    is_draining: bool = False
    session_tokens: int | None = None
    targets: int | None = None
    first_row_s: float | None = None
    more_row_s: float | None = None
    memory_bytes: int | None = None
    uptime_s: float | None = None
    states: Sequence[str] = ()  # of the engines of a vLLM server
    gate: Mapping[str, bool] = field(default_factory=dict)  # by rows in a step: are drafts on, in all engines?

    def follows(self, earlier: Reading) -> bool:
        """Whether this is a later one of the same counters; after a restart they begin anew."""
        grown = self.stats.since(earlier.stats)
        pairs = [(self.target_steps, earlier.target_steps), (self.draft_steps or 0, earlier.draft_steps or 0)]
        counts = (grown.rounds, grown.hits, grown.submitted, grown.accepted, grown.rows, grown.rolled_back)
        return min(counts) >= 0 and all(now >= before for now, before in pairs)


def of_overview(overview: Overview, at_s: float) -> Reading:
    """The reading of a draft service that was asked by its own protocol."""
    return _of_service(overview.figures, printable(overview.settings.get("model", "")), at_s)


def of_page(samples: Iterable[Sample], at_s: float) -> Reading | None:
    """The reading of a page of metrics, of vLLM's or of a draft service's; None if it has none of ours."""
    ours = [sample for sample in samples if sample.name.startswith(_OF_VLLM) and 0 <= sample.value < math.inf]
    if any(sample.name.startswith(f"{_OF_VLLM}state") for sample in ours):
        return _of_vllm(ours, at_s)
    figures = _sums(ours, PREFIX)
    return _of_service(figures, "", at_s) if "uptime_seconds" in figures else None


def printable(text: object) -> str:
    """What others wrote, without anything that a terminal would obey."""
    return "".join(letter for letter in str(text) if letter.isprintable())


def _of_service(figures: Mapping[str, float], model: str, at_s: float) -> Reading:
    return Reading(
        at_s=at_s,
        model=model,
        stats=_stats(figures, rows="rows", submitted="submitted_tokens"),
        target_steps=_count(figures, "target_steps"),
        draft_steps=_count(figures, "steps"),
        draft_step_s=figures.get("step_seconds"),
        undrafted=_undrafted(figures),
        faults=_count(figures, "faults"),
        sessions=_count(figures, "sessions"),
        active_sessions=_count(figures, "active_sessions"),
        waiting_rows=_count(figures, "waiting_rows"),
        is_draining=_count(figures, "draining") > 0,
        session_tokens=_count(figures, "session_tokens"),
        targets=_count(figures, "targets"),
        first_row_s=figures.get("first_row_seconds"),
        more_row_s=figures.get("more_row_seconds"),
        memory_bytes=_count(figures, "memory_bytes") or None,
        uptime_s=figures.get("uptime_seconds"),
    )


def _of_vllm(samples: Sequence[Sample], at_s: float) -> Reading:
    figures = _sums(samples, _OF_VLLM)
    models = sorted({printable(sample.labels.get("model_name", "")) for sample in samples})
    states = {
        printable(sample.labels.get("engine", "")): sample.labels.get("state", "")
        for sample in samples
        if sample.name == f"{_OF_VLLM}state" and sample.value
    }
    gate: dict[str, bool] = {}
    for sample in samples:
        if sample.name == f"{_OF_VLLM}gate_open":
            rows = printable(sample.labels.get("rows", ""))
            gate[rows] = gate.get(rows, True) and sample.value > 0
    cost = {sample.name.removeprefix(_OF_VLLM): sample.value for sample in samples}
    return Reading(
        at_s=at_s,
        model=", ".join(models),
        stats=_stats(figures, rows="draft_rows", submitted="submitted_tokens_sum"),
        target_steps=_count(figures, "calls"),
        undrafted=_undrafted(figures),
        faults=_count(figures, "faults"),
        sessions=_count(figures, "sessions"),
        first_row_s=cost.get("draft_first_row_seconds"),
        more_row_s=cost.get("draft_more_row_seconds"),
        states=[printable(states[engine]) for engine in sorted(states)],
        gate=gate,
    )


def _stats(figures: Mapping[str, float], rows: str, submitted: str) -> Stats:
    return Stats(
        rounds=_count(figures, "hits") + _count(figures, "misses"),
        hits=_count(figures, "hits"),
        submitted=_count(figures, submitted),
        accepted=_count(figures, "accepted_tokens"),
        rows=_count(figures, rows),
        wait_s=figures.get("wait_seconds", 0.0),
        **{cause: _count(figures, f"rolled_back_tokens/{cause}") for cause in CAUSES},
    )


def _undrafted(figures: Mapping[str, float]) -> int:
    return sum(_count(figures, f"undrafted/{reason}") for reason in REASONS)


def _count(figures: Mapping[str, float], name: str) -> int:
    return round(figures.get(name, 0))


def _sums(samples: Iterable[Sample], prefix: str) -> dict[str, float]:
    """Values by the names that the draft service itself gives them, summed over engines."""
    sums: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith(prefix):
            label = next((f"/{sample.labels[own]}" for own in _OWN_LABELS if own in sample.labels), "")
            name = sample.name.removeprefix(prefix).removesuffix("_total") + label
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
