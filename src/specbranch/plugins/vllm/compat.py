"""All that depends on vLLM's version. Nothing else in the package looks into vLLM."""

from __future__ import annotations

import logging
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
