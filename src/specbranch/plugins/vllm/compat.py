"""All that depends on vLLM's version. Nothing else in the package looks into vLLM."""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger(__name__)

TESTED = ("0.32",)  # release series that the tests have run with


def warn_if_untested() -> None:
    """Say so, once, when this vLLM is not one that was tested."""
    import vllm

    if not str(vllm.__version__).startswith(tuple(f"{series}." for series in TESTED)):
        log.warning(
            "vLLM %s is not among the tested releases (%s); its proposer hook is experimental and may have changed",
            vllm.__version__,
            ", ".join(f"{series}.x" for series in TESTED),
        )


def mend_cpu_sampler() -> None:
    """Mend vLLM's verification of sampled requests on the CPU, where this vLLM needs it; other devices are left alone.

    `expand_batch_to_tokens` writes to a copy (vllm-project/vllm#55005). Its caller gets memory that nobody has written
    as temperature, top-k and top-p of every draft token: above temperature 0 any speculation has a wrong output law.
    `apply_top_k_top_p` raises in a step without draft tokens, so a request with top-k alone ends the engine.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler as module

    if not _expands_rightly(module.expand_batch_to_tokens):
        log.warning("this vLLM verifies sampled tokens wrongly on the CPU (vllm-project/vllm#55005); mended in place")
        module.expand_batch_to_tokens = _expand_batch_to_tokens
    if not _takes_no_rows(module.apply_top_k_top_p):
        log.warning("this vLLM fails on the CPU at top-k in a step without drafts; mended in place")
        module.apply_top_k_top_p = _unless_empty(module.apply_top_k_top_p)


def _expands_rightly(expand: Any) -> bool:
    import torch

    values, ends = torch.tensor([0.625, 0.0, 0.375]), torch.tensor([1, 3, 4], dtype=torch.int32)
    return bool(expand(values, ends, 4, replace_from=0, replace_to=1).tolist() == [0.625, 1.0, 1.0, 0.375])


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Each row's value once for each of its tokens; the arguments are vLLM's."""
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(lengths, output_size=num_tokens)


def _takes_no_rows(apply: Any) -> bool:
    import torch

    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return False
    return True


def _unless_empty(apply: Any) -> Any:
    return lambda logits, k, p: apply(logits, k, p) if len(logits) else logits


def is_output_rank() -> bool:
    """Whether vLLM takes the drafts of this worker: the first tensor-parallel rank of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def num_speculative_tokens(vllm_config: Any) -> int:
    """The longest submission that vLLM will take."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def max_model_len(vllm_config: Any) -> int:
    """The longest text that vLLM will hold."""
    return int(vllm_config.model_config.max_model_len)


def own_config(vllm_config: Any) -> Any:
    """Our section of `--additional-config`; vLLM passes it through unread."""
    return (vllm_config.additional_config or {}).get("specbranch", {})


def run_in_this_process(num_cores: int) -> None:
    """Set the environment for an engine without processes of its own; to be called before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in {
        "OMP_NUM_THREADS": str(num_cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def proposer_of(llm: Any) -> Any:
    """The proposer of an engine that runs in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.drafter


def draft_tokens(llm: Any) -> tuple[int, int]:
    """Draft tokens that vLLM verified since its start, and those of them that it accepted, by its own counters."""
    totals = {"vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    submitted, accepted = totals.values()
    return submitted, accepted


def reported_logprobs(completion: Any) -> list[dict[int, float]]:
    """The log-probabilities that vLLM reports for each token of a completion; empty if none were asked for."""
    return [{token: float(one.logprob) for token, one in place.items()} for place in completion.logprobs or []]


def json_shape(schema: dict[str, Any]) -> Any:
    """The sampling parameter that holds an output to JSON of this schema."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def describe(llm: Any) -> dict[str, str]:
    """What this engine is: vLLM's version, the element type and the device that it settled on."""
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        "vllm": str(vllm.__version__),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": str(config.device_config.device_type),
    }
