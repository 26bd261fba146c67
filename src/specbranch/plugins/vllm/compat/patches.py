"""Workarounds for bugs of vLLM, each applied only where a test call shows the bug; a warning if vLLM is untested."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")  # release series that the matrix of tests has run with


def warn_if_untested() -> None:
    """Log a warning if this vLLM is not among the tested releases."""
    import vllm

    if not str(vllm.__version__).startswith(tuple(f"{series}." for series in TESTED)):
        log.warning(
            "vLLM %s is not among the tested releases (%s); its proposer hook is experimental and may have changed",
            vllm.__version__,
            ", ".join(f"{series}.x" for series in TESTED),
        )


def patch_cpu_sampler() -> list[str]:
    """Work around three bugs in vLLM's rejection sampler on the CPU, where this vLLM has them; what was replaced.

    0.30 calls Triton's kernels, which a CPU does not have, in place of its own. `expand_batch_to_tokens` writes to a
    copy (vllm-project/vllm#55005). Its caller reads uninitialised memory as temperature, top-k and top-p of each draft
    token. Above temperature 0, any speculative decoding then has a wrong output distribution. `apply_top_k_top_p`
    raises in a step without draft tokens, which ends the engine.

    To be called once the model runner exists: before 0.31 it is the runner that puts the CPU's kernels in place.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    from vllm.v1.sample import rejection_sampler as module

    replaced = _use_own_kernels(module)
    if replaced:
        log.warning("this vLLM cannot verify draft tokens on the CPU; workaround applied")
    if not _expands_rightly(module.expand_batch_to_tokens):
        log.warning(
            "this vLLM verifies sampled tokens wrongly on the CPU (vllm-project/vllm#55005); workaround applied"
        )
        module.expand_batch_to_tokens = _expand_batch_to_tokens
        replaced.append("expand_batch_to_tokens")
    if not _takes_no_rows(module.apply_top_k_top_p):
        log.warning("this vLLM fails on the CPU when top-k is set and a step has no draft tokens; workaround applied")
        module.apply_top_k_top_p = _unless_empty(module.apply_top_k_top_p)
        replaced.append("apply_top_k_top_p")
    return replaced


def _use_own_kernels(module: Any) -> list[str]:
    """Let the sampler call the kernels that vLLM has put into its module, where it still holds others."""
    replaced = []
    for name in ("rejection_greedy_sample", "rejection_random_sample", "expand", "sample_recovered_tokens"):
        dispatcher, kernel = getattr(module, f"_{name}", None), getattr(module, f"{name}_kernel", None)
        if kernel is not None and getattr(dispatcher, "kernel", kernel) is not kernel:
            dispatcher.kernel = kernel  # type: ignore[union-attr]
            replaced.append(f"{name}_kernel")
    return replaced


def _expands_rightly(expand: Any) -> bool:
    import torch

    values, ends = torch.tensor([0.625, 0.0, 0.375]), torch.tensor([1, 3, 4], dtype=torch.int32)
    try:
        return bool(expand(values, ends, 4, replace_from=0, replace_to=1).tolist() == [0.625, 1.0, 1.0, 0.375])
    except TypeError:  # the kernel does not take its arguments by these names
        return False


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Repeat each row's value for each of its tokens; the arguments are vLLM's."""
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
