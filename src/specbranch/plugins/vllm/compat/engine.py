"""A vLLM engine that runs in this process: its proposer, its counters, what it reports."""

from __future__ import annotations

from typing import Any

from specbranch.plugins.vllm.messages import Engine


def proposer_of(llm: Any) -> Any:
    """The proposer of an engine that runs in this process; on Model Runner V2 the speculator around it."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return runner.drafter if hasattr(runner, "drafter") else runner.speculator


def draft_tokens(llm: Any) -> tuple[int, int]:
    """Draft tokens that vLLM verified and accepted since its start, by its own counters."""
    totals = {"vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    submitted, accepted = totals.values()
    return submitted, accepted


def reported_logprobs(completion: Any) -> list[dict[int, float]]:
    """The log-probabilities that vLLM reports for each token of a completion; empty if none were asked for."""
    return [{token: float(one.logprob) for token, one in position.items()} for position in completion.logprobs or []]


def json_shape(schema: dict[str, Any]) -> Any:
    """The sampling parameter that restricts an output to JSON of this schema."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def describe(llm: Any) -> Engine:
    """The engine's versions, dtype and device."""
    import torch
    import transformers
    import vllm

    config = llm.llm_engine.vllm_config
    return Engine(
        {module.__name__: str(module.__version__) for module in (vllm, torch, transformers)},
        str(config.model_config.dtype).removeprefix("torch."),
        str(config.device_config.device_type),
    )
