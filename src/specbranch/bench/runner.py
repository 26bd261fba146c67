"""Run benchmarks on real engines, each on its own cores; every prompt is answered by all methods, in a random order.

Every record is written as soon as it is measured; the first line of a result file has the versions, machine and commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from specbranch.bench.results import Record, header, write_line
from specbranch.bench.scenario import BenchMethod, Scenario, read_prompt_sets
from specbranch.launch.draft_process import DraftProcess
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import (
    DecodedOutput,
    DecodeJob,
    DecodeResult,
    PromptRequest,
    TargetProcess,
    step_gaps_s,
)
from specbranch.machine import provenance
from specbranch.service.client.stats import ServiceStatus, StatsClient

_REPORT_S = 5.0
_COUNTED = ("rounds", "hits", "submitted", "accepted", "rows", "rejected", "unused", "cut")
_WARM_UP = "Count from one to ten."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measurement: one method answers `messages`, a group of prompts, in one batch.

    `first_prompt` is the index of the group's first prompt among the prompts of its task.
    """

    task: str
    concurrency: int
    repeat: int
    first_prompt: int
    messages: tuple[str, ...]
    method: BenchMethod


def plan_trials(scenario: Scenario, data: Path) -> list[Trial]:
    """Return all measurements in the order to run them: each group of prompts with one method after the other.

    `data` is the directory of the prompt files. Groups and methods are in random order. If memory cannot hold all
    engines, each engine answers a block of groups before the next engine is loaded.
    """
    order = random.Random(scenario.seed)
    trials: list[Trial] = []
    texts = dict(read_prompt_sets(scenario, data))
    for repeat in range(scenario.repeats):
        groups = [
            (task, size, start, tuple(messages[start : start + size]))
            for task, messages in texts.items()
            for size in scenario.concurrency
            for start in range(0, len(messages) - size + 1, size)[: scenario.groups]
        ]
        order.shuffle(groups)
        for first in range(0, len(groups), scenario.block):
            for methods in _method_groups(scenario, order):
                for task, size, start, messages in groups[first : first + scenario.block]:
                    order.shuffle(methods)
                    trials += [
                        Trial(
                            task=task,
                            concurrency=size,
                            repeat=repeat,
                            first_prompt=start,
                            messages=messages,
                            method=method,
                        )
                        for method in methods
                    ]
    return trials


def _method_groups(scenario: Scenario, order: random.Random) -> list[list[BenchMethod]]:
    """Return the groups of methods to measure side by side: a group of all methods, or a group for each engine.

    Groups for each engine, in random order, are for scenarios that limit how many engines are loaded at once.
    """
    if scenario.engines_at_once is None:
        return [list(scenario.methods)]
    by_engine: dict[str, list[BenchMethod]] = {}
    for method in scenario.methods:
        by_engine.setdefault(method.engine, []).append(method)
    groups = list(by_engine.values())
    order.shuffle(groups)
    return groups


def run_scenario(
    scenario: Scenario,
    data: Path,
    sink: TextIO,
    progress: Callable[[int, int], None],
    num_done: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> None:
    """Measure all trials except the first `num_done`, and write a line of JSON for each to `sink`.

    `data` is the directory of the prompt files. Call `progress` with the number of trials done and of all trials, and
    `on_stage` with a message before each load of an engine.
    """
    trials = plan_trials(scenario, data)
    with _engines(scenario, on_stage) as engines:
        if not num_done:
            write_line(sink, header(scenario, engines.provenance()))
        for number, trial in enumerate(trials[num_done:], start=num_done):
            progress(number, len(trials))
            write_line(sink, engines.measure(trial))
        progress(len(trials), len(trials))


@dataclass(slots=True)
class _Engines:
    """The running engines of a benchmark: the draft service, and the loaded targets in the order of their loading.

    `stats_clients` has for each method with drafts a client that fetches the service's stats.
    """

    scenario: Scenario
    draft: DraftProcess
    stats_clients: dict[str, StatsClient]
    logs: Path
    on_stage: Callable[[str], None]
    targets: dict[str, TargetProcess] = field(default_factory=dict)

    def provenance(self) -> dict[str, Any]:
        assert self.draft.welcome is not None
        versions = next(iter(self.targets.values())).engine.versions
        return {**provenance(), **versions, "draft": Path(self.draft.welcome.model).name}

    def load(self) -> None:
        """Load the scenario's engines in the order of its methods, up to the number that it allows at once."""
        for method in self.scenario.methods:
            if method.engine not in self.targets and self._has_room():
                self._start(method)

    def close(self) -> None:
        while self.targets:
            self._close_oldest()

    def _has_room(self) -> bool:
        limit = self.scenario.engines_at_once
        return limit is None or len(self.targets) < limit

    def _start(self, method: BenchMethod) -> None:
        """Load a method's engine, and warm it up with every method that shares it."""
        self.on_stage(f"loading {self.scenario.target} for {method.name}")
        target = _target(self.scenario, method, self.draft.address, self.logs / f"{method.name}.log")
        self.targets[method.engine] = target.__enter__()
        for one in self.scenario.methods:
            if one.engine == method.engine:
                self._generate(one, (_WARM_UP,), max_tokens=24)

    def _close_oldest(self) -> None:
        self.targets.pop(next(iter(self.targets))).__exit__(None, None, None)

    def measure(self, trial: Trial) -> Record:
        if trial.method.engine not in self.targets:
            while not self._has_room():
                self._close_oldest()
            self._start(trial.method)
        before = self._stats(trial.method)
        done = self._generate(trial.method, trial.messages, self.scenario.max_tokens)
        after = self._stats(trial.method)
        return {
            "task": trial.task,
            "concurrency": trial.concurrency,
            "repeat": trial.repeat,
            "prompt": trial.first_prompt,
            "method": trial.method.name,
            "tokens": sum(len(answer.tokens) for answer in done.answers),
            "elapsed_s": done.elapsed_s,
            "first_s": max(answer.steps[0][0] for answer in done.answers),
            "rounds": sum(len(answer.steps) for answer in done.answers),
            "step_ms": _step_ms(done.answers),
            "digests": [_digest(answer.tokens) for answer in done.answers],
            "counts": done.counts,
            "verified": [done.submitted, done.accepted],
            "draft": {name: after[name] - before.get(name, 0) for name in after},
            "draft_us": self._draft_us(trial.method),
        }

    def _stats(self, method: BenchMethod) -> dict[str, int]:
        """Fetch the draft service's counters for a method, and return them by name.

        The dict is empty if the service does not answer, and for a method that gets no drafts from the service.
        """
        stats_client = self.stats_clients.get(method.name)
        if (
            stats_client is None
            or stats_client.poll(_REPORT_S) is not ServiceStatus.ANSWERS
            or stats_client.stats is None
        ):
            return {}
        return {name: getattr(stats_client.stats, name) for name in _COUNTED}

    def _draft_us(self, method: BenchMethod) -> list[int] | None:
        """Return two times in microseconds: of a draft step of one row, and of each further row; None without stats."""
        stats_client = self.stats_clients.get(method.name)
        stats = stats_client.stats if stats_client else None
        return [stats.first_row_us, stats.more_row_us] if stats else None

    def _generate(self, method: BenchMethod, messages: tuple[str, ...], max_tokens: int) -> DecodeResult:
        scenario = self.scenario
        sampling = {"temperature": scenario.temperature, "top_p": scenario.top_p, "max_tokens": max_tokens}
        settings = self.scenario.proposer_settings(method, self.draft.address)
        requests = [PromptRequest(message, sampling, is_chat=True) for message in messages]
        return self.targets[method.engine].run(DecodeJob(requests, settings=settings))


@contextlib.contextmanager
def _engines(scenario: Scenario, on_stage: Callable[[str], None]) -> Iterator[_Engines]:
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-bench-")))
        draft = stack.enter_context(DraftProcess(scenario.draft_options(), on_progress=on_stage))
        drafting = [method for method in scenario.methods if method.has_service]
        stats_clients = {method.name: StatsClient(draft.address, method.name.encode()) for method in drafting}
        for stats_client in stats_clients.values():
            stack.callback(stats_client.close)
        engines = _Engines(scenario, draft, stats_clients, logs, on_stage)
        stack.callback(engines.close)
        engines.load()
        yield engines


def _target(scenario: Scenario, method: BenchMethod, address: str, log_file: Path) -> TargetProcess:
    arguments: dict[str, Any] = {
        "dtype": scenario.dtype,
        "max_model_len": scenario.max_model_len,
        "max_num_seqs": max(scenario.concurrency),
        "seed": scenario.seed,
        "enforce_eager": bool(scenario.target_cores),  # compiling for a CPU takes minutes and gains little
        "enable_prefix_caching": False,
        **scenario.arguments,
    }
    if method.speculative_config is not None:
        arguments["speculative_config"] = method.found_speculative_config()
    options = LocalEngineOptions(
        scenario.target, scenario.proposer_settings(method, address), scenario.gamma, arguments
    )
    return TargetProcess(options, log_file, scenario.cores_of(method))


def _step_ms(answers: list[DecodedOutput]) -> float | None:
    """Return the median time between engine steps in milliseconds; None if no answer has two steps."""
    gaps = step_gaps_s(answers)
    return 1e3 * median(gaps) if gaps else None


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
