"""What the programs that run real vLLM have in common. Imported before vLLM: it sets vLLM's environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.placement import split_cores, usable_cores
from specbranch.plugins.vllm.compat import drafter_of
from specbranch.plugins.vllm.settings import proposer_arguments, read_settings

# Apart from each other: threads that wait for one another suffer badly when a core has two things to do.
CORES = split_cores(usable_cores(), target_on_cpu=True, draft_on_cpu=True)
if CORES.target:
    os.sched_setaffinity(0, CORES.target)
    os.environ["OMP_NUM_THREADS"] = str(len(CORES.target))
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@contextlib.contextmanager
def draft_service(model: str, *arguments: str) -> Iterator[str]:
    """The address of a running draft service."""
    extra = ("--log-level", "warning", *arguments)
    with DraftProcess(DraftServiceOptions(model, cores=CORES.draft, extra=extra)) as service:
        yield service.address


def drafting(address: str, **section: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that make it draft through a service."""
    ours = {"address": address, "planner": "pearl", "deadline_ms": 60000, "is_gated": False, **section}
    return proposer_arguments(read_settings(ours), 4)


def proposer_of(llm: Any) -> Any:
    """The proposer of an engine whose only worker is in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return drafter_of(core.model_executor.driver_worker.worker.model_runner)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def metric(llm: Any, name: str) -> float:
    """A counter of vLLM's own."""
    return float(sum(found.value for found in llm.get_metrics() if found.name == name))


def squared(q: Distribution | None) -> Distribution | None:
    """A distribution as it were at half its temperature."""
    if q is None:
        return None
    weights = [prob**2 for prob in q.probs]
    return Distribution(q.ids, tuple(weight / sum(weights) for weight in weights), 0.0)
