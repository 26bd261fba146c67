"""A scenario: everything that a benchmark run depends on, in one TOML file that is stored with its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbranch.bench.prompts import TASKS
from specbranch.core.planners import SettingError, planner_names, suggest
from specbranch.engines.models import found_model
from specbranch.errors import SpecBranchError
from specbranch.extensions import load_planners
from specbranch.launch.draft_process import DraftOptions
from specbranch.plugins.vllm.layout import Layout
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.service.wire.messages import MAX_WAIT_MS

BARE = "bare"

_Natural = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Rate = Annotated[float, Meta(gt=0, lt=1e9)]


class ScenarioError(SpecBranchError, ValueError):
    """A scenario that cannot be run; the message says why."""


class PromptSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` prompts of a task, from a file in the data directory.

    With `field` any JSONL file will do: that field holds the prompt, and the task may have any name. `skip`
    leaves out the prompts that a count of as many would take: those of `specbranch train collect`.
    """

    task: str
    file: str
    count: _Positive
    field: str | None = None
    skip: _Natural = 0


class BenchMethod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to decode: our proposer with a planner, vLLM with a `speculative_config` of its own, or bare vLLM.

    `cores` are those of the whole method if it has no planner; a planner has the target's and the draft's.
    """

    name: str
    planner: str | None = None
    speculative_config: dict[str, Any] | None = None
    cores: list[_Natural] | None = None
    settings: dict[str, Any] = {}
    predictor: str = "confidence"
    is_gated: bool = True
    pad: str = "auto"
    rule: str = "match"

    @property
    def engine(self) -> str:
        """A key for the engine to load; methods with the same key share one engine."""
        if self.planner is not None:
            return "ours"
        return json.dumps([self.speculative_config, self.cores], sort_keys=True)

    def found_speculative_config(self) -> dict[str, Any]:
        """The `speculative_config` of a method of vLLM; its draft model is found below $SPECBRANCH_MODELS."""
        config = self.speculative_config or {}
        return {**config, "model": found_model(config["model"])} if "model" in config else config


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load on a server: requests arrive at random times, at `rates` per second, whether or not others are answered."""

    rates: list[_Rate]
    requests: _Positive = 32
    max_num_seqs: _Positive = 64


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pair of models on given cores, prompts, and the methods to compare.

    Without `target_cores` nothing is pinned, as on a GPU. `arguments` are passed to `vllm.LLM`, or to `vllm serve` as
    flags, and `draft_arguments` to `specbranch draft`. `gamma` is the most draft tokens verified at once. `concurrency`
    says how many requests are answered together, and `groups` how many such groups of each task are measured at most.
    With `served`, real servers are measured under load instead.

    If memory cannot hold all engines, `engines_at_once` says how many it can hold. Each engine then answers a `block`
    of groups before the next one is loaded in its place.
    """

    name: str
    target: str
    draft: str
    prompts: list[PromptSet]
    methods: list[BenchMethod]
    dtype: str = "bfloat16"
    target_cores: list[_Natural] = msgspec.field(default_factory=lambda: [0])
    draft_cores: list[_Natural] = msgspec.field(default_factory=lambda: [1])
    draft_arguments: list[str] = []
    arguments: dict[str, Any] = {}
    max_tokens: _Positive = 128
    max_model_len: _Positive = 1024
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    gamma: _Positive = 8
    deadline_ms: Annotated[float, Meta(ge=0, le=MAX_WAIT_MS)] = 1000.0
    groups: _Positive | None = None
    concurrency: list[_Positive] = msgspec.field(default_factory=lambda: [1])
    repeats: _Positive = 1
    seed: int = 0
    block: _Positive = 1
    engines_at_once: _Positive | None = None
    served: Served | None = None

    def as_json(self) -> dict[str, Any]:
        """The scenario as a plain document."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @property
    def num_trials(self) -> int:
        """How many measurements a whole run takes."""
        if self.served is not None:
            return self.repeats * len(self.methods) * len(self.served.rates)
        groups = sum(
            len(range(0, prompts.count - size + 1, size)[: self.groups])
            for prompts in self.prompts
            for size in self.concurrency
        )
        return self.repeats * len(self.methods) * groups

    def num_cores(self, method: BenchMethod) -> int:
        """How many cores a method uses, or devices if none are pinned; fair comparisons divide by it."""
        if not self.target_cores:
            return Layout.of_arguments(self.arguments).num_devices + (method.planner is not None)
        if method.planner is not None:
            return len({*self.target_cores, *self.draft_cores})
        return len(method.cores or self.target_cores)

    def draft_options(self) -> DraftOptions:
        """How the draft service is started."""
        return DraftOptions(
            self.draft,
            cores=self.draft_cores or None,
            threads=len(self.draft_cores) or None,
            extra=["--log-level", "warning", *self.draft_arguments],
        )

    def check(self) -> None:
        """Raise now what vLLM's worker would raise of a method's settings once its model is loaded."""
        for method in self.methods:
            settings = self.proposer_settings(method, "ipc://unused")
            if settings is not None:
                settings.client_options(self.gamma)

    def proposer_settings(self, method: BenchMethod, address: str) -> ProposerSettings | None:
        """The proposer's settings for a method; None if vLLM runs without our proposer."""
        if method.planner is None:
            return None
        return ProposerSettings(
            address=address,
            planner=method.planner,
            settings=method.settings,
            predictor=method.predictor,
            is_gated=method.is_gated,
            pad=method.pad,
            rule=method.rule,
            deadline_ms=self.deadline_ms,
            namespace=method.name,
        )


def scenario_of(document: dict[str, Any]) -> Scenario:
    """The scenario of a result file; what it does not name has its default."""
    return msgspec.convert(document, Scenario)


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file, checked."""
    load_planners()
    try:
        scenario = msgspec.toml.decode(path.read_bytes(), type=Scenario)
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{path} is not a scenario: {error}") from error
    for prompts in scenario.prompts:
        if prompts.field is None and prompts.task not in TASKS:
            raise ScenarioError(f"{path}: no task is called {prompts.task!r}; {suggest(prompts.task, TASKS)}")
    names = [method.name for method in scenario.methods]
    if len(set(names)) != len(names) or BARE not in names:
        raise ScenarioError(f"{path}: methods need different names, and one must be {BARE!r}, without a planner")
    for method in scenario.methods:
        if method.name == BARE and (method.planner is not None or method.speculative_config is not None):
            raise ScenarioError(f"{path}: {BARE!r} must be vLLM alone, without a planner and without speculation")
        if method.planner is not None and (method.speculative_config is not None or method.cores is not None):
            raise ScenarioError(
                f"{path}: {method.name!r} has a planner; speculative_config and cores are only for methods without one"
            )
        if method.planner is not None and method.planner not in planner_names():
            hint = suggest(method.planner, planner_names())
            raise SettingError(f"{path}: no planner is called {method.planner!r}; {hint}")
    return scenario
