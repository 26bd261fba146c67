"""What the methods of a scenario need of this machine, checked before anything loads.

Packages, draft models, cores and memory. A method that cannot run would otherwise fail minutes later, after the engines
of other methods have been loaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable

from specbranch import machine
from specbranch.bench.scenario import BenchMethod, Scenario, ScenarioError
from specbranch.core.planners import suggest
from specbranch.engines.models import require_model, weight_bytes
from specbranch.errors import SpecBranchError
from specbranch.launch.vllm_flags import known_speculation
from specbranch.plugins.vllm import installed

_WITH_DRAFT = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")  # methods of vLLM that need a model
_PACKAGES = {"suffix": ("arctic_inference", "pip install --no-build-isolation --no-deps arctic-inference==0.1.1")}
_CACHE_GB = 1.0  # what an engine of the benchmark takes for its KV cache, unless VLLM_CPU_KVCACHE_SPACE says otherwise
_GB = 1e9


def check_methods(scenario: Scenario) -> None:
    """Raise `ScenarioError` for the first method that cannot run here, with its name, the cause and the way out."""
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
                settings.client_options(scenario.gamma)
        except SpecBranchError as error:
            raise ScenarioError(f"method {method.name!r}: {error}") from error
    if installed.runs_on_cpu():
        _check_memory(scenario)


def engines_that_fit(sizes: Iterable[int], free: int) -> int:
    """Return how many engines of these sizes fit into memory at once, whichever of them they are."""
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
        have = ",".join(str(core) for core in sorted(allowed))
        raise ScenarioError(f"{name} has core {lacking[0]}, and this process may use {have}; name cores that it has")


def _check_speculation(method: BenchMethod) -> None:
    """Check a `speculative_config` of vLLM: its names, its package, its draft model."""
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
        require_model("the model of its speculative_config", str(model))


def _check_memory(scenario: Scenario) -> None:
    """Weights and KV caches of the engines that are loaded together must fit, beside the draft's weights."""
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
            f"free beside the draft; {way_out}"
        )


def _engine_bytes(scenario: Scenario, method: BenchMethod) -> int:
    cache_gb = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or _CACHE_GB)
    cache = scenario.arguments.get("kv_cache_memory_bytes") or int(cache_gb * (1 << 30))
    own_draft = (method.speculative_config or {}).get("model")
    drafted = weight_bytes(str(own_draft), scenario.dtype) if own_draft is not None else 0
    return weight_bytes(scenario.target, scenario.dtype) + drafted + int(cache)
