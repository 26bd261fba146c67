"""A vLLM engine: what it reports, and calls into its workers, which may be other processes.

Functions that run in a worker get it as their first argument, and are named here, so that another process finds them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from typing import Any

from specbranch.errors import SpecBranchError
from specbranch.plugins.vllm.compat import launch, patches, runner
from specbranch.plugins.vllm.messages import Engine
from specbranch.plugins.vllm.settings import ProposerSettings


class WorkerError(SpecBranchError, RuntimeError):
    """What a worker of vLLM was asked to do has failed there; the message says why."""


def use(llm: Any, settings: ProposerSettings) -> None:
    """Give the proposers of all workers other settings; wrong ones raise."""
    faults = [fault for fault in llm.collective_rpc(_use, args=(settings,)) if fault is not None]
    if faults:
        raise WorkerError(faults[0])


def proposer_counts(llm: Any) -> dict[str, float]:
    """The counters of the proposer that drafts; those of other workers have none."""
    return {name: count for counts in llm.collective_rpc(_counts) for name, count in counts.items()}


def patch_cpu_sampler(llm: Any) -> None:
    """Work around bugs of vLLM's sampler in all workers; see `patches`."""
    llm.collective_rpc(_patch_cpu_sampler)


def ignore_interrupts(llm: Any) -> None:
    """Let workers in other processes ignore Ctrl-C: it is for the process that asks them, which may want to go on."""
    llm.collective_rpc(_ignore_interrupts)


def shut_down(llm: Any) -> None:
    """End the engine and its workers. They would end with this process too, but vLLM would call that an error."""
    llm.llm_engine.engine_core.shutdown()


def _use(worker: Any, settings: ProposerSettings) -> str | None:
    # An error must not be raised in a worker: vLLM would take the answers of the others for those of the next call.
    try:
        runner.drafter_of(worker.model_runner).use(settings)
    except Exception as error:
        return str(error) or repr(error)
    return None


def _counts(worker: Any) -> dict[str, float]:
    counts: dict[str, float] = runner.drafter_of(worker.model_runner).counts()
    return counts


def _num_pads(worker: Any) -> int:
    # Bare vLLM has no drafter, and its own drafters do not pad.
    return int(getattr(runner.drafter_of(worker.model_runner), "num_pads", 0))


def _patch_cpu_sampler(worker: Any) -> None:
    patches.patch_cpu_sampler()


def _ignore_interrupts(worker: Any) -> None:
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def draft_tokens(llm: Any) -> tuple[int, int]:
    """Draft tokens that vLLM verified and accepted since its start, by its own counters, without pads."""
    totals = {"vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    submitted, accepted = totals.values()
    return submitted - sum(llm.collective_rpc(_num_pads)), accepted


def reported_logprobs(completion: Any) -> list[dict[int, float]]:
    """The log-probabilities that vLLM reports for each token of a completion; empty if none were asked for."""
    return [{token: float(one.logprob) for token, one in position.items()} for position in completion.logprobs or []]


def json_shape(schema: dict[str, Any]) -> Any:
    """The sampling parameter that restricts an output to JSON of this schema."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def describe(llm: Any) -> Engine:
    """The engine's versions, dtype and device, and how it computes."""
    import torch
    import transformers
    import vllm

    config = llm.llm_engine.vllm_config
    return Engine(
        {module.__name__: str(module.__version__) for module in (vllm, torch, transformers)},
        str(config.model_config.dtype).removeprefix("torch."),
        str(config.device_config.device_type),
        is_eager=bool(config.model_config.enforce_eager),
        is_invariant=launch.is_batch_invariant(),
    )
