"""All that depends on vLLM's version and internals: configuration, runners, environment, patches.

V2 refuses `custom_class`, the method that brings our proposer into V1. Of the methods that V2 takes, `ngram_gpu` needs
no draft model and goes with asynchronous scheduling. So a configuration that names our proposer and asks for V2 is
given this method where vLLM would then choose V2, and V2's runner is given our speculator in place of the one for
n-grams. Everywhere else, and by default, the configuration stays as it is, and vLLM runs V1.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specbranch.core.distribution import RequestSampling
from specbranch.plugins.vllm.settings import METHOD, SECTION, LayoutError, ParallelLayout, RunnerError, limit_of

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, to share its level and format
Array = np.ndarray[Any, np.dtype[Any]]
PAD = -1  # vLLM's own filler for draft tokens: never embedded, always rejected
_V1, _V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_OWNER, _METHOD = "GPUModelRunner", "execute_model"
_WARMUPS = ("_warmup_", "_v2_mixed_warmup")
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")  # release series that the matrix of tests has run with
_MIN_TEMPERATURE = 1e-5  # below it vLLM is greedy
_MAX_TEMPERATURE = 100.0


def num_speculative_tokens(vllm_config: Any) -> int:
    """Return the maximum of draft tokens that vLLM verifies per sequence and step."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def max_model_len(vllm_config: Any) -> int:
    """Return the maximum length of a sequence, prompt and output together."""
    return int(vllm_config.model_config.max_model_len)


def vocab_len(vllm_config: Any) -> int:
    """Return the size of the target's vocabulary. vLLM fails at a token id beyond it, also in a draft."""
    return int(vllm_config.model_config.get_vocab_size())


def layout(vllm_config: Any) -> ParallelLayout:
    """Read how the target is spread over devices."""
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    return ParallelLayout(
        tensor=int(parallel.tensor_parallel_size),
        pipeline=int(parallel.pipeline_parallel_size),
        data=int(parallel.data_parallel_size),
        executor=executor if isinstance(executor, str) else None,  # or a class
    )


def has_graphs_for_equal_rows(vllm_config: Any) -> bool:
    """Return whether only steps in which all rows have equally many tokens run from whole CUDA graphs.

    vLLM decides it for good when it has loaded the model and knows its attention backend.
    """
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    if mode is None or not mode.separate_routine() or not mode.has_full_cudagraphs():
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def tokenizer(vllm_config: Any) -> str:
    """Return the directory, or the name on the hub, of the target's tokenizer."""
    found = vllm_config.model_config
    return str(found.tokenizer or found.model)


def own_config(vllm_config: Any) -> Any:
    """Return our section of `--additional-config`, which vLLM passes on unread."""
    return (vllm_config.additional_config or {}).get(SECTION, {})


def engine_index(vllm_config: Any) -> int:
    """Return the number of this data-parallel engine; vLLM's own metrics use the same."""
    return int(vllm_config.parallel_config.data_parallel_index)


def model_name(vllm_config: Any) -> str:
    """Return the name that the target is served by; vLLM's own metrics use the same."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What is new in a step that vLLM has scheduled.

    These are the prompts that it begins to prefill and the draft may prefill too, the number of pads among its draft
    tokens, the maximum of draft tokens of new requests that named one, and the requests that have ended.
    """

    prompts: Sequence[Sequence[int]] = ()
    num_pads: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    ended: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of a batch after a step, the same from either runner.

    `tokens` is the whole sequence, `num_new` how many of them the step has sampled: 0 in prefill, and then `tokens` may
    be empty. `skip_cause` is why the row gets no draft: `lora`, `multimodal` or `seed`. `is_sampled`: it is not greedy,
    or nobody knows. `sampling`: vLLM verifies its draft tokens by the distributions that they were sampled from.
    """

    tokens: Array
    num_new: int
    name: str | None = None
    skip_cause: str | None = None
    is_sampled: bool = True
    sampling: RequestSampling | None = None


def v1_rows(runner: Any, sampled: Sequence[Sequence[int]], lengths: Array, table: Array) -> list[BatchRow]:
    """Build the rows of V1's batch after a step that sampled these tokens; `lengths` and `table` are vLLM's.

    Rows with a LoRA adapter or with images get no drafts: the draft model knows neither. Nor do those sampled with a
    seed (`is_seeded`). Where the runner is None or not as expected, nothing is known of the requests.
    """
    num_rows = len(sampled)
    names = getattr(getattr(runner, "input_batch", None), "req_ids", ())[:num_rows]
    known: list[tuple[str | None, bool]] = [(None, True)] * num_rows
    try:
        loras = runner.input_batch.request_lora_mapping[:num_rows].tolist() if runner is not None else ()
        for index, name in enumerate(names):
            request = runner.requests[name]
            is_sampled = bool(getattr(request.sampling_params, "temperature", True))
            has_seed = is_sampled and is_seeded(request.sampling_params)
            known[index] = _skip_cause(request.mm_features, has_seed, loras[index]), is_sampled
    except (AttributeError, LookupError, TypeError) as error:
        _warn_of_runner(repr(error))
    names = names if len(names) == num_rows else [None] * num_rows
    return [
        BatchRow(
            table[index, : int(lengths[index])] if new else table[index, :0], len(new), names[index], *known[index]
        )
        for index, new in enumerate(sampled)
    ]


def v2_rows(
    runner: Any,
    names: Sequence[str],
    slots: Sequence[int],
    texts: Sequence[tuple[Array, int]],
    samplings: Mapping[int, RequestSampling],
) -> list[BatchRow]:
    """Build the rows of V2's batch, of which `texts` are the tokens and how many of them are new; as `v1_rows`."""
    known: list[tuple[str | None, bool]] = [(None, True)] * len(names)
    if runner is not None:
        features = runner.encoder_cache.mm_features if runner.encoder_cache is not None else {}
        states = runner.sampler.sampling_states
        for index, (name, slot) in enumerate(zip(names, slots, strict=True)):
            is_sampled = bool(states.temperature.np[slot])
            has_seed = is_sampled and bool(states.seeds_set[slot])
            cause = _skip_cause(features.get(name), has_seed, runner.lora_state.lora_ids[slot])
            known[index] = cause, is_sampled
    return [
        BatchRow(tokens, num_new, names[index], *known[index], samplings.get(index))
        for index, (tokens, num_new) in enumerate(texts)
    ]


def _skip_cause(features: Any, has_seed: bool, lora: Any) -> str | None:
    if features:
        return "multimodal"
    return "seed" if has_seed else "lora" if lora else None


def is_output_rank() -> bool:
    """Return whether vLLM takes this worker's drafts: those of the last pipeline stage's first tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def broadcast(tensor: Any) -> Any:
    """Copy the first tensor-parallel rank's values of this tensor to all ranks; return them."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast(tensor, src=0)


def wrap_runners() -> None:
    """Patch vLLM's runners to call `on_step_scheduled` of their drafter before each step, with what the step brings.

    vLLM's hook passes rows without their requests, and only after the prefill. This wraps the one method of vLLM that
    runs a step; its arguments pass through. V2's scheduler also asks the runner for the drafts; a second wrapper cuts
    them to their lengths. A vLLM without these methods stays as it is.
    """
    # The caller runs in vLLM, which has imported its runner, so this imports nothing heavy.
    old, new = (getattr(sys.modules.get(module), _OWNER, None) for module in (_V1, _V2))
    if not hasattr(old, _METHOD) and not hasattr(new, _METHOD):
        log.warning(
            "this vLLM has no %s.%s; requests with LoRA or images get drafts from a model that knows neither",
            _OWNER,
            _METHOD,
        )
    _wrap(old, _METHOD, _wrap_execute_model)
    _wrap(new, _METHOD, _wrap_execute_model)
    _wrap(new, "take_draft_token_ids", _wrap_take_drafts)


def _wrap(owner: Any, method: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap a method of a class, once, if the class has it."""
    original = getattr(owner, method, None)
    if original is not None and not hasattr(original, "introduces"):
        wrapped = wrapper(original)
        wrapped.introduces = True
        setattr(owner, method, wrapped)


def drafter_of(runner: Any) -> Any:
    """Return the drafter of a runner, ours or vLLM's; V1 and V2 have different names for it."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def _wrap_execute_model(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = drafter_of(runner)
        on_step_scheduled = getattr(drafter, "on_step_scheduled", None)
        if on_step_scheduled is None:
            return original(runner, *args, **kwargs)
        scheduler_output = args[0] if args else kwargs.get("scheduler_output")
        on_step_scheduled(runner, _step_info(scheduler_output))
        feature_hook = getattr(drafter, "feature_hook", None)
        if feature_hook is None:
            return original(runner, *args, **kwargs)
        feature_hook.begin(runner, scheduler_output)
        output = original(runner, *args, **kwargs)
        feature_hook.end(runner)
        return output

    return execute_model


def _wrap_take_drafts(original: Any) -> Any:
    @functools.wraps(original)
    def take_draft_token_ids(runner: Any) -> Any:
        answer = original(runner)
        trim_drafts = getattr(drafter_of(runner), "trim_drafts", None)
        return answer if trim_drafts is None or answer is None else trim_drafts(answer)

    return take_draft_token_ids


def _step_info(scheduler_output: Any) -> StepInfo:
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
        return StepInfo(prompts, num_pads, known, scheduler_output.finished_req_ids)
    except AttributeError as error:
        _warn_of_runner(repr(error))
        return StepInfo()


def is_warmup(names: Sequence[str]) -> bool:
    """Return whether these are requests by which V2's runner compiles its kernels at start."""
    return all(name.startswith(_WARMUPS) for name in names)


def is_seeded(parameters: Any) -> bool:
    """Return whether a request samples with a seed of its own, so that its random numbers recur when it is repeated.

    Its output would then be proposed to a request that verifies it with the very numbers that made it. Nor would the
    seed give the same output again: with drafts it depends on what was drafted in time. At temperature 0 there is no
    randomness.
    """
    return bool(getattr(parameters, "temperature", 0)) and getattr(parameters, "seed", None) is not None


def allows_pads(runner: Any) -> bool:
    """Return whether pads leave the output of every row as it is.

    A thinking budget reads the draft tokens of its row, and for each of them vLLM draws from the generator of a seed.
    On the CPU, vLLM's sampler takes a pad for a token above temperature 0, and reads beyond its memory.
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
    """Work around three bugs in vLLM's rejection sampler on the CPU, where it has them; return what was replaced.

    0.30 calls Triton's kernels, which a CPU does not have, in place of its own. `expand_batch_to_tokens` writes to a
    copy (vllm-project/vllm#55005). Its caller reads uninitialised memory as temperature, top-k and top-p of each draft
    token. Above temperature 0, any speculative decoding then has a wrong output distribution. `apply_top_k_top_p`
    raises in a step without draft tokens, which ends the engine.

    Call it once the model runner exists: before 0.31 it is the runner that puts the CPU's kernels in place.
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
    """Replace stale Triton kernels of the sampler by the CPU's of the same module; return the names replaced."""
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


def check_runner(vllm_config: Any) -> None:
    """Raise if V1 has made our proposer though the settings name V2: an old vLLM, or one without our plugin."""
    if vllm_config.speculative_config.method == METHOD:
        raise RunnerError(
            "`runner` is 'v2', but this vLLM runs our proposer on Model Runner V1. It takes vLLM 0.32, and the plugin "
            "'specbranch' must not be left out by VLLM_PLUGINS; or set `runner` to 'auto'"
        )


def check_context_parallelism(vllm_config: Any) -> None:
    """Raise if groups of ranks would ask for drafts separately: what they embed would differ."""
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size > 1:
        raise LayoutError(
            f"prefill context parallelism ({size} ranks) cannot be combined with drafts: each rank would ask for its "
            "own. Use tensor parallelism (--tensor-parallel-size), or serve without a draft"
        )


def has_adaptive_verification(vllm_config: Any) -> bool:
    """Return whether vLLM chooses how many places of each row it verifies, by our confidence in them."""
    return bool(vllm_config.speculative_config.enable_adaptive_verification)


def is_any_sampled(runner: Any, input_batch: Any) -> bool:
    """Return whether a row of a batch is not greedy."""
    try:
        return bool((runner.sampler.sampling_states.temperature.np[input_batch.idx_mapping_np] > 0).any())
    except AttributeError as error:
        _warn_of_sampler(repr(error))
        return False


def samplings(runner: Any, input_batch: Any, vocab_len: int) -> dict[int, RequestSampling]:
    """Return how the rows sample whose draft tokens may be sampled; on all ranks the same.

    A grammar or a thinking budget cuts a draft by its tokens, and verification must not depend on them; of grammars
    only the batch as a whole is known. Return nothing where the runner's logits are not as wide as the vocabulary.
    """
    try:
        if input_batch.has_structured_output_reqs or _logits_len(runner, vocab_len) != vocab_len:
            return {}
        states = runner.sampler.sampling_states
        has_budget = getattr(runner.sampler.thinking_budget_state, "use_thinking_budget", None)  # None: nobody can
        found = {}
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            temperature = float(states.temperature.np[slot])
            if _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE and (has_budget is None or not has_budget[slot]):
                top_k = int(states.top_k.np[slot])
                top_p = float(states.top_p.np[slot])
                found[row] = RequestSampling(temperature, top_p, top_k if top_k < states.vocab_size else 0)
    except AttributeError as error:
        _warn_of_sampler(repr(error))
        return {}
    return found


def _logits_len(runner: Any, vocab_len: int) -> int:
    """Return how many tokens the logits of a runner's model have; `vocab_len` if it does not say."""
    processor = getattr(getattr(runner, "model", None), "logits_processor", None)
    return int(getattr(processor, "org_vocab_size", vocab_len))


@functools.cache
def _warn_of_sampler(cause: str) -> None:
    log.warning("this vLLM's sampler is not as expected (%s); draft tokens are proposed as certain", cause)
