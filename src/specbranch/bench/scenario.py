"""The scenario of a benchmark: read it and its prompts, and check that this machine can run it.

The checks cover packages, draft models, cores and memory. A method that cannot run would otherwise fail minutes later,
after the engines of other methods have been loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbranch import machine
from specbranch.core.planners import SettingError, planner_names, suggest
from specbranch.engines.models import check_model_exists, resolve_model, weight_bytes
from specbranch.errors import SpecBranchError
from specbranch.extensions import load_extensions
from specbranch.launch.child import join_cores
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.launch.vllm_flags import known_speculation
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ParallelLayout, ProposerSettings
from specbranch.service.wire.messages import MAX_WAIT_MS

BARE = "bare"

_Natural = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Rate = Annotated[float, Meta(gt=0, lt=1e9)]
_Row = dict[str, Any]
_CHAT = {"writing", "roleplay", "reasoning", "stem", "humanities", "extraction"}
_Task = tuple[Callable[[_Row], bool], Callable[[_Row], str]]
_WITH_DRAFT = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")  # methods of vLLM that need a draft
_PACKAGES = {"suffix": ("arctic_inference", "pip install --no-build-isolation --no-deps arctic-inference==0.1.1")}
_LOAD_PACKAGE = "pandas"  # of `vllm bench serve`, to read prompts; vLLM does not install it
_CACHE_GB = 1.0  # KV cache of an engine of the benchmark, unless VLLM_CPU_KVCACHE_SPACE sets another size
_GB = 1e9


class ScenarioError(SpecBranchError, ValueError):
    """A scenario that cannot be run; the message names the cause."""


class PromptSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts of one task: `count` of them, spread evenly over a file in the data directory.

    With `field`, the file may be any JSONL file with the prompts in that field, and the task may have any name. `skip`
    excludes the prompts that a `PromptSet` with `count=skip` would select, for example those already used by
    `specbranch train collect`.
    """

    task: str
    file: str
    count: _Positive
    field: str | None = None
    skip: _Natural = 0


class BenchMethod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to decode: our proposer with a planner, vLLM with a `speculative_config` of its own, or bare vLLM.

    With a `planner`, vLLM runs on the scenario's `target_cores` and the draft model on its `draft_cores`; `settings`
    are the planner's, and `predictor`, `is_gated`, `pad` and `rule` are settings of our proposer. Without
    `uses_service`, drafts come only from n-gram lookup in the text. Such a method, and one without a planner, runs on
    `cores`, by default the `target_cores`.
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
    uses_service: bool = True

    @property
    def has_service(self) -> bool:
        """Whether the method gets drafts from the draft service."""
        return self.planner is not None and self.uses_service

    @property
    def engine(self) -> str:
        """The key of the engine to load; methods with the same key share one engine."""
        if self.has_service:
            return "ours"
        return json.dumps([self.planner is not None, self.speculative_config, self.cores], sort_keys=True)

    def found_speculative_config(self) -> dict[str, Any]:
        """Return the method's `speculative_config` for vLLM, with the name of a draft model replaced by its path."""
        config = self.speculative_config or {}
        return {**config, "model": resolve_model(config["model"])} if "model" in config else config


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load test of a server: at each of `rates`, that many requests per second arrive on average, at random times.

    A request does not wait for the answers to earlier requests. `requests` is the number of requests at each rate, and
    `max_num_seqs` the server's limit of sequences in one batch.
    """

    rates: list[_Rate]
    requests: _Positive = 32
    max_num_seqs: _Positive = 64


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One benchmark: a pair of models, the cores that they run on, the prompts, and the methods to compare.

    Without `target_cores` nothing is pinned, as on a GPU. `arguments` are passed to `vllm.LLM`, or to `vllm serve` as
    flags, and `draft_arguments` to `specbranch draft`. `gamma` is the maximum of draft tokens verified at once.
    `deadline_ms` is the longest time that the target waits for a draft. `concurrency` lists group sizes: the requests
    of a group are sent together. `groups` limits the number of groups for each size and task. With `served`, real
    servers are measured under load instead.

    If memory cannot hold all engines, `engines_at_once` is how many it can hold. Each engine then answers a `block` of
    groups before the next one is loaded in its place.
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
        """Return the scenario as a JSON dict."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @property
    def num_trials(self) -> int:
        """The number of measurements of a whole run."""
        if self.served is not None:
            return self.repeats * len(self.methods) * len(self.served.rates)
        groups = sum(
            len(range(0, prompts.count - size + 1, size)[: self.groups])
            for prompts in self.prompts
            for size in self.concurrency
        )
        return self.repeats * len(self.methods) * groups

    def num_cores(self, method: BenchMethod) -> int:
        """Return how many cores a method uses, or how many devices if nothing is pinned, for speeds per core."""
        if not self.target_cores:
            return ParallelLayout.of_arguments(self.arguments).num_devices + method.has_service
        if method.has_service:
            return len({*self.target_cores, *self.draft_cores})
        return len(method.cores or self.target_cores)

    def cores_of(self, method: BenchMethod) -> list[int]:
        """Return the cores that a method's vLLM is pinned to; [] if it is not pinned."""
        return method.cores or self.target_cores

    def draft_options(self) -> DraftServiceOptions:
        """Return the options to start the draft service with: the scenario's draft model, cores and arguments."""
        return DraftServiceOptions(
            self.draft,
            cores=self.draft_cores or None,
            threads=len(self.draft_cores) or None,
            extra=["--log-level", "warning", *self.draft_arguments],
        )

    def check(self) -> None:
        """Raise an error for wrong proposer settings, which vLLM's worker would refuse only after loading its model."""
        for method in self.methods:
            settings = self.proposer_settings(method, "ipc://unused")
            if settings is not None:
                settings.checked_settings(self.gamma)

    def proposer_settings(self, method: BenchMethod, address: str) -> ProposerSettings | None:
        """Return the proposer's settings for a method and a draft service at `address`.

        Return None for a method without a planner: vLLM then runs without our proposer.
        """
        if method.planner is None:
            return None
        return ProposerSettings(
            address=address if method.uses_service else None,
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
    """Return the scenario from its JSON dict in a result file; missing keys get their defaults."""
    return msgspec.convert(document, Scenario)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file and check its contents; raise `ScenarioError` or `SettingError` if they are wrong."""
    load_extensions()
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
        if (method.planner is not None and method.speculative_config is not None) or (
            method.has_service and method.cores is not None
        ):
            raise ScenarioError(
                f"{path}: {method.name!r} has a planner; speculative_config and cores are only for methods without one"
            )
        if method.planner is not None and method.planner not in planner_names():
            hint = suggest(method.planner, planner_names())
            raise SettingError(f"{path}: no planner is called {method.planner!r}; {hint}")
    return scenario


def _of_spec_bench(*categories: str) -> _Task:
    return lambda row: row["category"] in categories, lambda row: row["turns"][0]


def _any_rows(field: str) -> _Task:
    return lambda row: True, lambda row: str(row[field])


# task: (a function that selects its rows of the file, a function that returns a row's first message)
_TASKS: dict[str, _Task] = {
    "humaneval": (lambda row: True, lambda row: "Complete this Python function.\n\n" + row["prompt"]),
    "gsm8k": (lambda row: True, lambda row: row["question"]),
    "mt-bench": _of_spec_bench(*_CHAT, "coding", "math"),
    "translation": _of_spec_bench("translation"),
    "summarization": _of_spec_bench("summarization"),
    "qa": _of_spec_bench("qa"),
    "math": _of_spec_bench("math_reasoning"),
    "rag": _of_spec_bench("rag"),
    "chat": _of_spec_bench(*_CHAT),
}

TASKS = tuple(_TASKS)


class PromptError(SpecBranchError, ValueError):
    """A file does not have the expected prompts; the message says how to correct this."""


def read_prompts(task: str, path: Path, count: int, field: str | None = None, skip: int = 0) -> list[str]:
    """Read `count` prompts of a task from a file and return them; they are spread evenly over it, always the same ones.

    Without `field`, the file must have the form of the task, one of `TASKS`; with it, any JSONL file will do that has
    the prompts in this field. The prompts that `read_prompts` returns for `count=skip` are left out, so that two sets
    can be disjoint. Raise `PromptError` if the file cannot be read or has too few prompts.
    """
    if field is None and task not in _TASKS:
        raise PromptError(
            f"no task is called {task!r}; choose from {', '.join(TASKS)}, or name the field that holds the prompt"
        )
    belongs, message = _TASKS[task] if field is None else _any_rows(field)
    try:
        rows = [row for line in path.read_text().splitlines() if belongs(row := json.loads(line))]
        skipped = _spread(rows, skip)
        found = [message(row) for row in _spread([row for row in rows if row not in skipped], count)]
    except OSError as error:
        raise PromptError(
            f"cannot read {path}: {error.strerror}; name an existing file (of `bench run`: in the directory --data)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(
            f"{path} does not hold prompts of {task} ({error!r}); --field names the field of another file"
        ) from error
    if len(found) < count:
        raise PromptError(f"{path} holds {len(found)} prompts of {task}, but {count} are needed; ask for fewer")
    return found


def read_prompt_sets(scenario: Scenario, data: Path) -> list[tuple[str, list[str]]]:
    """Read every prompt set of a scenario from the files in the directory `data`; return each task with its prompts."""
    return [
        (one.task, read_prompts(one.task, data / one.file, one.count, one.field, one.skip)) for one in scenario.prompts
    ]


def _spread(rows: list[_Row], count: int) -> list[_Row]:
    """Return `count` rows at even distances, or all rows if there are fewer."""
    return rows[:: max(1, len(rows) // count)][:count] if count > 0 else []


def check_methods(scenario: Scenario) -> None:
    """Raise `ScenarioError`, with cause and remedy, if this machine cannot run the scenario.

    The causes are missing cores or packages, a method that cannot run, and too little memory for engines on a CPU.
    """
    allowed = os.sched_getaffinity(0)
    _check_cores("target_cores", scenario.target_cores, allowed)
    _check_cores("draft_cores", scenario.draft_cores, allowed)
    for method in scenario.methods:
        try:
            _check_cores("cores", method.cores or (), allowed)
            if method.speculative_config is not None:
                _check_speculation(method)
            settings = scenario.proposer_settings(method, "ipc://unused")
            if settings is not None:
                settings.checked_settings(scenario.gamma)
        except SpecBranchError as error:
            raise ScenarioError(f"method {method.name!r}: {error}") from error
    if scenario.served is not None and importlib.util.find_spec(_LOAD_PACKAGE) is None:
        raise ScenarioError(
            f"`vllm bench serve`, which sends the load, needs the package {_LOAD_PACKAGE}: "
            f"pip install {_LOAD_PACKAGE}, or leave out [served]"
        )
    if installed.runs_on_cpu():
        _check_memory(scenario)


def engines_that_fit(sizes: Iterable[int], free: int) -> int:
    """Return how many engines fit into `free` bytes together, whichever engines they are.

    `sizes` has the bytes that each engine needs; the largest are counted first.
    """
    count = 0
    for size in sorted(sizes, reverse=True):
        free -= size
        if free < 0:
            break
        count += 1
    return count


def _check_cores(name: str, cores: Collection[int], allowed: Collection[int]) -> None:
    lacking = sorted(set(cores) - set(allowed))
    if lacking:
        have = join_cores(sorted(allowed))
        raise ScenarioError(f"{name} has core {lacking[0]}, and this process may use {have}; name cores that it has")


def _check_speculation(method: BenchMethod) -> None:
    """Raise an error if vLLM could not run a method's `speculative_config`.

    The causes are an unknown name in it, a package that is not installed, and a missing draft model.
    """
    config = method.speculative_config or {}
    kind, model, known = config.get("method"), config.get("model"), known_speculation()
    if kind is None and model is None:
        raise ScenarioError("its speculative_config names neither a method nor a model; name one of them")
    if known is not None and kind is not None and kind not in known.methods:
        raise ScenarioError(f"vLLM has no speculative method {kind!r}; {suggest(str(kind), sorted(known.methods))}")
    for key in config if known is not None else ():
        if known is not None and key not in known.keys:
            raise ScenarioError(f"vLLM's speculative_config has no {key!r}; {suggest(key, sorted(known.keys))}")
    package, way_out = _PACKAGES.get(str(kind), (None, ""))
    if package is not None and importlib.util.find_spec(package) is None:
        raise ScenarioError(f"it needs the package {package}, which is not installed; {way_out}; or leave it out")
    if kind in _WITH_DRAFT and model is None:
        raise ScenarioError(f"{kind!r} needs a draft; name it as `model` in its speculative_config")
    if model is not None:
        check_model_exists("the model of its speculative_config", str(model))


def _check_memory(scenario: Scenario) -> None:
    """Raise `ScenarioError` if the engines that are loaded together do not fit into the free memory with the draft.

    An engine needs memory for its weights and its KV cache, the draft for its weights.
    """
    free = machine.free_host_memory()
    if free is None:
        return
    room = free - weight_bytes(scenario.draft)
    sizes = {method.engine: _engine_bytes(scenario, method) for method in scenario.methods}
    at_once = 1 if scenario.served is not None else min(len(sizes), scenario.engines_at_once or len(sizes))
    fitting = engines_that_fit(sizes.values(), room)
    if fitting < at_once:
        needed = sum(sorted(sizes.values(), reverse=True)[:at_once])
        largest = max(scenario.methods, key=lambda method: sizes[method.engine])
        share = f"{sizes[largest.engine] / _GB:.1f} GB of it for method {largest.name!r}"
        way_out = f"set engines_at_once = {fitting}" if fitting else "use smaller models, or types with fewer bytes"
        raise ScenarioError(
            f"{at_once} engines at once need {needed / _GB:.1f} GB of memory, {share}, and {room / _GB:.1f} GB are "
            f"free next to the draft; {way_out}"
        )


def _engine_bytes(scenario: Scenario, method: BenchMethod) -> int:
    cache_gb = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or _CACHE_GB)
    cache = scenario.arguments.get("kv_cache_memory_bytes") or int(cache_gb * (1 << 30))
    own_draft = (method.speculative_config or {}).get("model")
    drafted = weight_bytes(str(own_draft), scenario.dtype) if own_draft is not None else 0
    return weight_bytes(scenario.target, scenario.dtype) + drafted + int(cache)
