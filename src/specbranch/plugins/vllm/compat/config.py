"""What the proposer reads from vLLM's configuration."""

from __future__ import annotations

from typing import Any

from specbranch.plugins.vllm.arguments import SECTION
from specbranch.plugins.vllm.layout import Layout


def num_speculative_tokens(vllm_config: Any) -> int:
    """The most draft tokens that vLLM verifies per sequence and step."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def max_model_len(vllm_config: Any) -> int:
    """The longest sequence that vLLM allows, prompt and output together."""
    return int(vllm_config.model_config.max_model_len)


def vocab_len(vllm_config: Any) -> int:
    """The size of the target's vocabulary; vLLM fails at a token id beyond it, also in a draft."""
    return int(vllm_config.model_config.get_vocab_size())


def layout(vllm_config: Any) -> Layout:
    """How the target is spread over devices."""
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    return Layout(
        tensor=int(parallel.tensor_parallel_size),
        pipeline=int(parallel.pipeline_parallel_size),
        data=int(parallel.data_parallel_size),
        executor=executor if isinstance(executor, str) else None,  # or a class
    )


def has_graphs_for_equal_rows(vllm_config: Any) -> bool:
    """Whether steps in which all rows have as many tokens run from whole CUDA graphs, and other steps do not.

    vLLM decides it for good when it has loaded the model and knows its attention backend.
    """
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    if mode is None or not mode.separate_routine() or not mode.has_full_cudagraphs():
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def tokenizer(vllm_config: Any) -> str:
    """The directory or the name on the hub that vLLM takes the target's tokenizer from."""
    found = vllm_config.model_config
    return str(found.tokenizer or found.model)


def own_config(vllm_config: Any) -> Any:
    """Our section of `--additional-config`; vLLM passes it on without looking at it."""
    return (vllm_config.additional_config or {}).get(SECTION, {})


def engine_index(vllm_config: Any) -> int:
    """Which of the data-parallel engines this is; vLLM's own metrics use the same number."""
    return int(vllm_config.parallel_config.data_parallel_index)


def model_name(vllm_config: Any) -> str:
    """The name that the target is served by; vLLM's own metrics use the same."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)
