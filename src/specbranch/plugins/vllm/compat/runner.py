"""What the proposer must know of vLLM's model runner: its rank, the prompts that begin, rows that cannot be drafted."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

PAD = -1  # vLLM's own filler for draft tokens: never embedded, always rejected

_RUNNER = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model")


def is_output_rank() -> bool:
    """Whether vLLM takes the drafts of this worker: the first tensor-parallel rank of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def introduce_runners() -> None:
    """Let a runner tell its proposer, before each step, who it is and which prompts it is about to prefill.

    vLLM's hook passes rows without their requests, and only after the prefill. This wraps the one method of vLLM that
    runs a step; its arguments pass through. A vLLM without this method is left alone.
    """
    module, owner, method = _RUNNER
    # Whoever makes a proposer has imported its runner, so nothing heavy needs to be imported here.
    runner = getattr(sys.modules.get(module), owner, None)
    original = getattr(runner, method, None)
    if runner is None or original is None:
        log.warning(
            "this vLLM has no %s.%s; requests with LoRA or images get drafts from a model that knows neither",
            owner,
            method,
        )
    elif not hasattr(original, "introduces"):
        setattr(runner, method, _introducing(original))


def _introducing(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(runner, "drafter", None)
        meet = getattr(drafter, "meet", None)
        if meet is None:
            return original(runner, *args, **kwargs)
        scheduler_output = args[0] if args else kwargs.get("scheduler_output")
        meet(runner, _new_prompts(scheduler_output), _num_pads(scheduler_output))
        feature_hook = getattr(drafter, "feature_hook", None)
        if feature_hook is None:
            return original(runner, *args, **kwargs)
        feature_hook.begin(runner, scheduler_output)
        output = original(runner, *args, **kwargs)
        feature_hook.end(runner)
        return output

    execute_model.introduces = True  # type: ignore[attr-defined]
    return execute_model


def _new_prompts(scheduler_output: Any) -> list[list[int]]:
    """Prompts that a step begins to prefill, without those that have a LoRA adapter or images."""
    try:
        return [
            request.prompt_token_ids
            for request in scheduler_output.scheduled_new_reqs
            if request.prompt_token_ids and not request.lora_request and not request.mm_features
        ]
    except AttributeError as error:
        _warn_of_runner(repr(error))
        return []


def _num_pads(scheduler_output: Any) -> int:
    """How many of the draft tokens of a step are none."""
    try:
        return sum(tokens.count(PAD) for tokens in scheduler_output.scheduled_spec_decode_tokens.values())
    except AttributeError as error:
        _warn_of_runner(repr(error))
        return 0


def rows_aside(runner: Any, num_rows: int) -> Mapping[int, str]:
    """Rows that the draft model cannot draft for, and the cause: `lora` or `multimodal`."""
    try:
        batch = runner.input_batch
        aside = {int(row): "lora" for row in batch.request_lora_mapping[:num_rows].nonzero()[0]}
        for row, name in enumerate(batch.req_ids[:num_rows]):
            if runner.requests[name].mm_features:
                aside[row] = "multimodal"
        return aside
    except (AttributeError, KeyError, TypeError) as error:
        _warn_of_runner(repr(error))
        return {}


def allows_pads(runner: Any) -> bool:
    """Whether pads cannot make a difference to any row.

    A thinking budget looks at the draft tokens of its row. On the CPU, vLLM's sampler takes a pad for a token above
    temperature 0, and reads beyond its memory.
    """
    try:
        if runner.device.type == "cpu" and not runner.input_batch.all_greedy:
            return False
        parameters = (runner.requests[name].sampling_params for name in runner.input_batch.req_ids)
        return all(getattr(one, "thinking_token_budget", None) is None for one in parameters)
    except (AttributeError, KeyError, TypeError) as error:
        _warn_of_runner(repr(error))
        return False


@functools.cache
def _warn_of_runner(cause: str) -> None:
    log.warning(
        "this vLLM's model runner is not as expected (%s); drafts may start late, also for LoRA and images",
        cause,
    )
