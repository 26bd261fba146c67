"""What the proposer must know of vLLM's model runner: its rank, the prompts that begin, rows that cannot be drafted."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbranch.plugins.vllm.limits import limit_of

log = logging.getLogger(__name__)

PAD = -1  # vLLM's own filler for draft tokens: never embedded, always rejected

_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_OWNER, _METHOD = "GPUModelRunner", "execute_model"
_WARMUPS = ("_warmup_", "_v2_mixed_warmup")


@dataclass(frozen=True, slots=True)
class News:
    """What is new in a step that vLLM has scheduled.

    The prompts that it begins to prefill and the draft may read too, how many of its draft tokens are pads, what new
    requests ask of their drafts (`limits.py`), and the requests that have ended.
    """

    prompts: Sequence[Sequence[int]] = ()
    num_pads: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    ended: Collection[str] = ()


def is_output_rank() -> bool:
    """Whether vLLM takes the drafts of this worker: the first tensor-parallel rank of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def broadcast(tensor: Any) -> Any:
    """What the first tensor-parallel rank has in this tensor, on all of them."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast(tensor, src=0)


def introduce_runners() -> None:
    """Let a runner tell its proposer, before each step, who it is and which prompts it is about to prefill.

    vLLM's hook passes rows without their requests, and only after the prefill. This wraps the one method of vLLM that
    runs a step; its arguments pass through. V2's scheduler also asks for the drafts; what the runner answers is cut to
    their lengths. A vLLM without these methods is left alone.
    """
    # Whoever makes a proposer has imported its runner, so nothing heavy needs to be imported here.
    old, new = (getattr(sys.modules.get(module), _OWNER, None) for module in (_V1, _V2))
    if not hasattr(old, _METHOD) and not hasattr(new, _METHOD):
        log.warning(
            "this vLLM has no %s.%s; requests with LoRA or images get drafts from a model that knows neither",
            _OWNER,
            _METHOD,
        )
    _wrap(old, _METHOD, _introducing)
    _wrap(new, _METHOD, _introducing)
    _wrap(new, "take_draft_token_ids", _cutting)


def _wrap(owner: Any, method: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap a method, once; nothing if it is not there."""
    original = getattr(owner, method, None)
    if original is not None and not hasattr(original, "introduces"):
        wrapped = wrapper(original)
        wrapped.introduces = True
        setattr(owner, method, wrapped)


def drafter_of(runner: Any) -> Any:
    """Our part in a runner, or vLLM's own; V1 and V2 have their own names for it."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def _introducing(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = drafter_of(runner)
        meet = getattr(drafter, "meet", None)
        if meet is None:
            return original(runner, *args, **kwargs)
        scheduler_output = args[0] if args else kwargs.get("scheduler_output")
        meet(runner, _news(scheduler_output))
        feature_hook = getattr(drafter, "feature_hook", None)
        if feature_hook is None:
            return original(runner, *args, **kwargs)
        feature_hook.begin(runner, scheduler_output)
        output = original(runner, *args, **kwargs)
        feature_hook.end(runner)
        return output

    return execute_model


def _cutting(original: Any) -> Any:
    @functools.wraps(original)
    def take_draft_token_ids(runner: Any) -> Any:
        answer = original(runner)
        cut = getattr(drafter_of(runner), "cut", None)
        return answer if cut is None or answer is None else cut(answer)

    return take_draft_token_ids


def _news(scheduler_output: Any) -> News:
    """Collect what a step brings, without vLLM's own requests and without prompts that are not drafted for."""
    try:
        requests = [request for request in scheduler_output.scheduled_new_reqs if not is_warmup([request.req_id])]
        limits = {request.req_id: limit_of(request.sampling_params) for request in requests}
        prompts = [
            request.prompt_token_ids
            for request in requests
            if request.prompt_token_ids and not request.lora_request and not request.mm_features
            if limits[request.req_id] != 0 and not is_seeded(request.sampling_params)
        ]
        num_pads = sum(tokens.count(PAD) for tokens in scheduler_output.scheduled_spec_decode_tokens.values())
        known = {name: limit for name, limit in limits.items() if limit is not None}
        return News(prompts, num_pads, known, scheduler_output.finished_req_ids)
    except AttributeError as error:
        _warn_of_runner(repr(error))
        return News()


def is_warmup(names: Sequence[str]) -> bool:
    """Whether these are requests by which V2's runner compiles its kernels at start."""
    return all(name.startswith(_WARMUPS) for name in names)


def rows_aside(runner: Any, num_rows: int) -> Mapping[int, str]:
    """Find the rows that get no drafts, and the cause: `lora`, `multimodal` or `seed`."""
    try:
        batch = runner.input_batch
        aside = {int(row): "lora" for row in batch.request_lora_mapping[:num_rows].nonzero()[0]}
        for row, name in enumerate(batch.req_ids[:num_rows]):
            request = runner.requests[name]
            if request.mm_features:
                aside[row] = "multimodal"
            elif is_seeded(request.sampling_params):
                aside[row] = "seed"
        return aside
    except (AttributeError, KeyError, TypeError) as error:
        _warn_of_runner(repr(error))
        return {}


def is_seeded(parameters: Any) -> bool:
    """Whether a request samples with a seed of its own, so that its random numbers come again when it is repeated.

    Its answer would then be proposed to a request that tests it with the very numbers that made it. Nor would the seed
    give the same answer again: with drafts it depends on what was drafted in time. At temperature 0 there is no chance.
    """
    return bool(getattr(parameters, "temperature", 0)) and getattr(parameters, "seed", None) is not None


def sampled_rows(runner: Any, num_rows: int) -> Collection[int]:
    """Find the rows that are not greedy; all of them where the runner does not tell."""
    try:
        names = runner.input_batch.req_ids[:num_rows]
        return [row for row, name in enumerate(names) if runner.requests[name].sampling_params.temperature]
    except (AttributeError, KeyError, TypeError) as error:
        _warn_of_runner(repr(error))
        return range(num_rows)


def row_names(runner: Any, num_rows: int) -> Sequence[str | None]:
    """The requests of a batch's rows, by vLLM's ids; no names where the runner does not tell."""
    names = getattr(getattr(runner, "input_batch", None), "req_ids", ())[:num_rows]
    return names if len(names) == num_rows else [None] * num_rows


def allows_pads(runner: Any) -> bool:
    """Whether pads cannot make a difference to any row.

    A thinking budget looks at the draft tokens of its row, and for each of them vLLM draws from the generator of a
    seed. On the CPU, vLLM's sampler takes a pad for a token above temperature 0, and reads beyond its memory.
    """
    try:
        if runner.device.type == "cpu" and not runner.input_batch.all_greedy:
            return False
        parameters = (runner.requests[name].sampling_params for name in runner.input_batch.req_ids)
        return not any(is_seeded(one) or getattr(one, "thinking_token_budget", None) is not None for one in parameters)
    except (AttributeError, KeyError, TypeError) as error:
        _warn_of_runner(repr(error))
        return False


@functools.cache
def _warn_of_runner(cause: str) -> None:
    log.warning(
        "this vLLM's model runner is not as expected (%s); drafts may start late, also for LoRA, images and seeds",
        cause,
    )
