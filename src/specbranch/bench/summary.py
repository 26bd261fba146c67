"""What a result file says: tokens per second of every method over bare vLLM, with the spread over prompts."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbranch.bench.runner import FORMAT

_BARE = "bare"
_RESAMPLES = 2000


class ResultError(ValueError):
    """A file that holds no results."""


@dataclass(frozen=True, slots=True)
class Line:
    """One method on one task at one concurrency. `low` and `high` hold 95 % of resampled ratios to bare."""

    task: str
    concurrency: int
    method: str
    trials: int
    tokens_per_s: float
    speedup: float
    low: float
    high: float
    emitted_per_round: float
    round_ms: float
    hook_ms: float | None  # mean time of the proposer's call, waits included
    hit_rate: float | None  # the draft's figures; None where nothing was drafted
    rolled_back: float | None  # drafted tokens lost per emitted token
    rows_per_round: float | None
    same_as_bare: float  # share of answers equal to bare vLLM's, token by token

    def as_json(self) -> dict[str, Any]:
        """The line as a plain document."""
        return asdict(self)


def read_results(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the records of a result file."""
    try:
        header, *records = (json.loads(line) for line in path.read_text().splitlines())
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} holds no results: {error}") from error
    if header.get("format") != FORMAT:
        raise ResultError(f"{path} is no result file of `specbranch bench`")
    return header, records


def summarize(records: Iterable[dict[str, Any]]) -> list[Line]:
    """A line for every method, in the order in which tasks, concurrencies and methods sort."""
    by_cell: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_cell[record["task"], record["concurrency"]][record["method"]].append(record)
    return [
        _line(task, concurrency, method, own, methods[_BARE])
        for (task, concurrency), methods in sorted(by_cell.items())
        for method, own in sorted(methods.items(), key=lambda item: (item[0] != _BARE, item[0]))
    ]


def ratio(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of one set of records over another's."""
    return _rate(own) / _rate(other)


def ratio_spread(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The range that holds 95 % of the ratios when the prompts are drawn anew; both see the same prompts."""
    pairs = _paired(own, other)
    order = random.Random(0)
    ratios = sorted(_resampled(pairs, order) for _ in range(_RESAMPLES))
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES) - 1]


def _line(task: str, concurrency: int, method: str, own: list[dict[str, Any]], bare: list[dict[str, Any]]) -> Line:
    low, high = ratio_spread(own, bare)
    calls = sum(record["counts"].get("calls", 0) for record in own)
    wait_s = sum(record["counts"].get("wait_s", 0.0) for record in own)
    rounds = sum(record["rounds"] for record in own)
    same = [
        a == b for mine, theirs in _paired(own, bare) for a, b in zip(mine["digests"], theirs["digests"], strict=True)
    ]
    return Line(
        task,
        concurrency,
        method,
        len(own),
        _rate(own),
        ratio(own, bare),
        low,
        high,
        sum(record["tokens"] for record in own) / rounds,
        1000 * concurrency * sum(record["elapsed_s"] - record["first_s"] for record in own) / max(rounds, 1),
        1000 * wait_s / calls if calls else None,
        *_draft_figures(own),
        sum(same) / len(same),
    )


def _draft_figures(own: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Hit rate, rolled-back tokens per emitted token, draft rows per round."""
    total: Counter[str] = Counter()
    for record in own:
        total.update(record["draft"])
    if not total["rounds"]:
        return None, None, None
    lost = total["rejected"] + total["unused"] + total["cut"]
    emitted = sum(record["tokens"] for record in own)
    return total["hits"] / total["rounds"], lost / emitted, total["rows"] / total["rounds"]


def _rate(records: Sequence[dict[str, Any]]) -> float:
    return float(sum(record["tokens"] for record in records) / sum(record["elapsed_s"] for record in records))


def _paired(
    own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of the same prompts, side by side; a run that was cut off leaves some without a partner."""
    partners = {(record["prompt"], record["repeat"]): record for record in other}
    keys = [(record["prompt"], record["repeat"]) for record in own]
    return [(record, partners[key]) for record, key in zip(own, keys, strict=True) if key in partners]


def _resampled(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], order: random.Random) -> float:
    drawn = order.choices(pairs, k=len(pairs))
    return ratio([mine for mine, _ in drawn], [theirs for _, theirs in drawn])
