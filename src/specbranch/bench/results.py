"""Read and write benchmark result files, and summarize them: speeds over bare vLLM's, with confidence intervals."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from specbranch.bench.scenario import BARE, BenchMethod, Scenario, scenario_of
from specbranch.core.tree import CAUSES
from specbranch.errors import SpecBranchError
from specbranch.trace import FORMAT as TRACE

VERSION = 1

Record = dict[str, Any]
NO_RANGE = "\u2013"
_RESAMPLES = 2000
_MIN_TRIALS = 3  # resampling fewer prompts does not measure their spread
Cell = tuple[str, int]  # task, concurrency
RESULTS = "specbranch-bench"  # the format that a result file names in its first line
_BEGIN_LEN = 1 << 16
_GZIP = b"\x1f\x8b"


class ResultError(SpecBranchError, ValueError):
    """A file is not a result file, cannot be read, or is of another scenario."""


@dataclass(frozen=True, slots=True)
class Results:
    """The contents of one result file. Compare methods only within one file: its methods ran under equal conditions."""

    name: str  # of the file
    scenario: Scenario
    provenance: dict[str, Any]
    records: Sequence[Record]

    def method(self, name: str) -> BenchMethod:
        """Return a method of the scenario by its name."""
        return next(method for method in self.scenario.methods if method.name == name)


def header(scenario: Scenario, provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the first line of a result file as a JSON dict: format, version, scenario and provenance."""
    return {"format": RESULTS, "version": VERSION, "scenario": scenario.as_json(), "provenance": provenance}


def read_results(path: Path) -> Results:
    """Read a result file, without an incomplete last line; raise `ResultError` if it is damaged or of another kind."""
    try:
        kind = describe_file(path)
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from error
    if "bench show" not in kind:
        raise ResultError(f"{path} is not a result file of `specbranch bench run`: it is {kind}")
    try:
        whole = path.read_text().rpartition("\n")[0]
        first, *records = (json.loads(line) for line in whole.splitlines())
        return Results(path.name, scenario_of(first["scenario"]), first.get("provenance", {}), records)
    except (ValueError, KeyError) as error:
        raise ResultError(f"{path} is a damaged result file ({type(error).__name__}: {error})") from error


def write_line(sink: TextIO, document: Record) -> None:
    """Write a JSON dict to the file `sink` as one line, and flush the file."""
    sink.write(json.dumps(document) + "\n")
    sink.flush()


def drop_unfinished(path: Path) -> None:
    """Remove an incomplete last line from a result file, so that the run can be resumed."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens per second of one method divided by another's on the same prompts, with a confidence interval.

    `low` and `high` bound the 95 % bootstrap confidence interval over prompts. `num_trials` is the number of prompts,
    or of groups of prompts, that both methods answered; for a mean over several tasks, it is the smallest of their
    numbers. `low` and `high` are None if it is below three, or if a method is compared with itself.
    """

    value: float
    low: float | None
    high: float | None
    num_trials: int

    @property
    def range(self) -> str:
        """The confidence interval as text; a dash if `low` and `high` are None."""
        return NO_RANGE if self.low is None or self.high is None else f"{self.low:.2f}-{self.high:.2f}"

    def scaled(self, factor: float) -> Ratio:
        """Return the ratio and its confidence interval, multiplied by a constant."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Ratio(self.value * factor, low, high, self.num_trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The results of one method on one task at one concurrency, over all prompts and repeats."""

    task: str
    concurrency: int
    method: str
    trials: int
    cores: int
    tokens_per_s: float
    speed: Ratio  # relative to bare vLLM
    speed_per_core: float  # relative to bare vLLM, both divided by the cores they use
    emitted_per_round: float
    round_ms: float
    step_ms: float | None  # median step time; None in older result files
    hook_ms: float | None  # mean time of the proposer's call, waits included
    accepted_share: float | None  # of the draft tokens that vLLM verified
    hit_rate: float | None  # of the draft; None without drafts
    rolled_back: Mapping[str, float] | None  # drafted tokens rolled back per emitted token, by cause
    rows_per_round: float | None
    same_as_bare: float  # share of answers equal to bare vLLM's, token by token
    first_s: float  # mean time to first token

    @property
    def lost(self) -> float | None:
        """Drafted tokens rolled back per emitted token, the sum over all causes; None without drafts."""
        return None if self.rolled_back is None else sum(self.rolled_back.values())

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Loss:
    """A task where another method is faster than the method that the report is about, in total or per core."""

    task: str
    concurrency: int
    other: str
    ahead: Ratio  # the other method's speed divided by the subject's
    is_per_core: bool


def cells(results: Results) -> dict[Cell, dict[str, list[Record]]]:
    """Return the records by task and concurrency, and then by method, in the scenario's order.

    Tasks and concurrencies without records of bare vLLM are left out, and so is a method at a task and concurrency
    where it has no record for the same prompt and repeat as bare vLLM.
    """
    by_cell: dict[Cell, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in results.records:
        by_cell[record["task"], record["concurrency"]][record["method"]].append(record)
    tasks = [prompts.task for prompts in results.scenario.prompts]
    names = [method.name for method in results.scenario.methods]
    return {
        cell: {name: by_cell[cell][name] for name in names if _paired(by_cell[cell][name], by_cell[cell][BARE])}
        for cell in sorted(by_cell, key=lambda cell: (tasks.index(cell[0]), cell[1]))
        if by_cell[cell][BARE]
    }


def summarize(results: Results) -> list[Line]:
    """Return a summary of the results: one line for each task, concurrency and method."""
    return [
        _line(results, cell, method, own, methods[BARE])
        for cell, methods in cells(results).items()
        for method, own in methods.items()
    ]


def mean_speeds(results: Results) -> dict[int, dict[str, Ratio]]:
    """Return each method's speed relative to bare vLLM, the geometric mean over all tasks, by concurrency and method.

    A method without records for one of the tasks is left out.
    """
    grouped: dict[int, list[dict[str, list[Record]]]] = defaultdict(list)
    for (_, concurrency), methods in cells(results).items():
        grouped[concurrency].append(methods)
    return {
        concurrency: {
            name: mean_ratio([(methods[name], methods[BARE]) for methods in tasks])
            for name in tasks[0]
            if all(name in methods for methods in tasks)
        }
        for concurrency, tasks in grouped.items()
    }


def losses(results: Results, subject: str) -> list[Loss]:
    """Return a loss for each case where another method is faster than `subject`, in total or, if not, per core."""
    found = []
    for (task, concurrency), methods in cells(results).items():
        if subject not in methods:
            continue
        cores = results.scenario.num_cores(results.method(subject))
        for other, records in methods.items():
            if other == subject:
                continue
            ahead = compare(records, methods[subject])
            share = cores / results.scenario.num_cores(results.method(other))
            if ahead.value > 1:
                found.append(Loss(task, concurrency, other, ahead, is_per_core=False))
            elif ahead.value * share > 1:
                found.append(Loss(task, concurrency, other, ahead.scaled(share), is_per_core=True))
    return found


def compare(own: Sequence[Record], other: Sequence[Record]) -> Ratio:
    """Return the speed of the records `own` divided by that of `other`, on the prompts that both have."""
    return mean_ratio([(own, other)])


def mean_ratio(tasks: Sequence[tuple[Sequence[Record], Sequence[Record]]]) -> Ratio:
    """Return the geometric mean over tasks of the first method's speed divided by the second's.

    `tasks` has the records of both methods for each task. The bootstrap for the confidence interval resamples the
    prompts of each task, each prompt together with all its repeats.
    """
    paired = [_by_prompt(_paired(own, other)) for own, other in tasks]
    value = _geometric_mean([_ratio([*chain(*prompts)]) for prompts in paired])
    fewest = min(len(prompts) for prompts in paired)
    is_itself = all(own is other for own, other in tasks)
    if fewest < _MIN_TRIALS or is_itself:
        return Ratio(value, None, None, fewest)
    order = random.Random(0)
    draws = sorted(
        _geometric_mean([_ratio([*chain(*order.choices(prompts, k=len(prompts)))]) for prompts in paired])
        for _ in range(_RESAMPLES)
    )
    return Ratio(value, draws[int(0.025 * _RESAMPLES)], draws[int(0.975 * _RESAMPLES) - 1], fewest)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _line(results: Results, cell: Cell, method: str, own: list[Record], bare: list[Record]) -> Line:
    task, concurrency = cell
    speed = compare(own, bare)
    cores, bare_cores = (results.scenario.num_cores(results.method(name)) for name in (method, BARE))
    calls = sum(record["counts"].get("calls", 0) for record in own)
    wait_s = sum(record["counts"].get("wait_s", 0.0) for record in own)
    rounds, emitted = sum(record["rounds"] for record in own), sum(record["tokens"] for record in own)
    verified = [sum(record.get("verified", (0, 0))[position] for record in own) for position in (0, 1)]
    steps_ms = [record["step_ms"] for record in own if record.get("step_ms") is not None]
    same = [
        a == b for mine, theirs in _paired(own, bare) for a, b in zip(mine["digests"], theirs["digests"], strict=True)
    ]
    hit_rate, rolled_back, rows_per_round = _draft_stats(own, emitted)
    return Line(
        task=task,
        concurrency=concurrency,
        method=method,
        trials=len(own),
        cores=cores,
        tokens_per_s=_rate(own),
        speed=speed,
        speed_per_core=speed.value * bare_cores / cores,
        emitted_per_round=emitted / rounds,
        round_ms=1000 * concurrency * sum(one["elapsed_s"] - one["first_s"] for one in own) / max(rounds, 1),
        step_ms=sorted(steps_ms)[len(steps_ms) // 2] if steps_ms else None,
        hook_ms=1000 * wait_s / calls if calls else None,
        accepted_share=verified[1] / verified[0] if verified[0] else None,
        hit_rate=hit_rate,
        rolled_back=rolled_back,
        rows_per_round=rows_per_round,
        same_as_bare=sum(same) / len(same),
        first_s=sum(record["first_s"] for record in own) / len(own),
    )


def _draft_stats(own: Sequence[Record], emitted: int) -> tuple[float | None, Mapping[str, float] | None, float | None]:
    """Return the hit rate, the rolled-back tokens per emitted token by cause, and the draft rows per round.

    They are taken over all records `own`, in which `emitted` tokens were emitted; all three are None without drafts.
    """
    total: Counter[str] = Counter()
    for record in own:
        total.update(record["draft"])
    if not total["rounds"]:
        return None, None, None
    lost = {cause: total[cause] / emitted for cause in CAUSES}
    return total["hits"] / total["rounds"], lost, total["rows"] / total["rounds"]


def _rate(records: Sequence[Record]) -> float:
    return float(sum(record["tokens"] for record in records) / sum(record["elapsed_s"] for record in records))


def _ratio(pairs: Sequence[tuple[Record, Record]]) -> float:
    return _rate([mine for mine, _ in pairs]) / _rate([theirs for _, theirs in pairs])


def _by_prompt(pairs: Sequence[tuple[Record, Record]]) -> list[list[tuple[Record, Record]]]:
    """Return the pairs grouped by prompt, so that the bootstrap keeps all repeats of a prompt together.

    Repeats vary with the machine only, not with the prompts.
    """
    found: dict[int, list[tuple[Record, Record]]] = defaultdict(list)
    for mine, theirs in pairs:
        found[mine["prompt"]].append((mine, theirs))
    return list(found.values())


def _paired(own: Sequence[Record], other: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return pairs of records, one of `own` and one of `other`, of the same prompt and repeat.

    A record without a partner, which an interrupted run may leave, is left out.
    """
    partners = {(record["prompt"], record["repeat"]): record for record in other}
    keys = [(record["prompt"], record["repeat"]) for record in own]
    return [(record, partners[key]) for record, key in zip(own, keys, strict=True) if key in partners]


def describe_file(path: Path) -> str:
    """Return a phrase that names the kind of a file, such as "a timeline; `specbranch timeline` reads it".

    Raise OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(_BEGIN_LEN)
    is_gzip = begin.startswith(_GZIP)
    if is_gzip:
        begin = _decompressed(path)
    if b'"traceEvents"' in begin:
        return "a timeline; `specbranch timeline` reads it"
    name = _format(begin)
    if name == TRACE:
        return "a trace of verdicts; `specbranch simulate --trace` reads it"
    if name == RESULTS:
        return "a result file of `specbranch bench run`; `specbranch bench show` reads it"
    if is_gzip:
        return "a gzip file of another program"
    return "empty" if not begin.strip() else "not a file that specbranch wrote"


def _decompressed(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read(_BEGIN_LEN)
    except (OSError, EOFError, zlib.error):
        return b""


def _format(begin: bytes) -> Any:
    """Return the format that a file's first line names; None if it names none or is not JSON."""
    try:
        first = json.loads(begin.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return first.get("format") if isinstance(first, dict) else None
