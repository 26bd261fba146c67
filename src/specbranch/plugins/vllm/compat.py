"""All that depends on vLLM's version and internals: configuration, runners, environment, patches.

V1 and V2 are vLLM's two model runners. V2 refuses `custom_class`, the method that brings our proposer into V1. Of the
methods that V2 supports, `ngram_gpu` needs no draft model and works with asynchronous scheduling. So if the settings
ask for V2 and vLLM can use it, the configuration gets this method, and V2 gets our speculator in place of the one for
n-grams. In all other cases, and by default, the configuration stays as it is, and vLLM runs V1.
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
    """Return how the target is spread over devices, as vLLM's configuration says."""
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    return ParallelLayout(
        tensor=int(parallel.tensor_parallel_size),
        pipeline=int(parallel.pipeline_parallel_size),
        data=int(parallel.data_parallel_size),
        executor=executor if isinstance(executor, str) else None,  # or a class
    )


def has_graphs_for_equal_rows(vllm_config: Any) -> bool:
    """Return whether vLLM uses whole CUDA graphs, and only for steps in which all rows have equally many tokens.

    The answer is final only after vLLM has loaded the model and chosen an attention backend.
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
    """Return the section of `--additional-config` with our settings, {} if there is none; vLLM does not read it."""
    return (vllm_config.additional_config or {}).get(SECTION, {})


def engine_index(vllm_config: Any) -> int:
    """Return the number of this data-parallel engine, the same as in vLLM's own metrics."""
    return int(vllm_config.parallel_config.data_parallel_index)


def model_name(vllm_config: Any) -> str:
    """Return the name under which the target is served, the same as in vLLM's own metrics."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The new requests, ended requests and padding of a step that vLLM has scheduled but not run yet.

    `prompts`: the prompts that get drafts and whose prefill the step begins. `num_pads`: how many of the step's draft
    tokens are padding tokens, with the id -1. `limits`: the maximum of draft tokens of each new request that names one,
    by the request's id. `ended`: the ids of the requests that have ended.
    """

    prompts: Sequence[Sequence[int]] = ()
    num_pads: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    ended: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of a batch after a step, in the same form for both runners.

    `tokens` is the whole sequence, and `num_new` of them were sampled in the step: 0 in prefill, and then `tokens` may
    be empty. `name` is vLLM's id of the request, None if unknown. `skip_cause` is why the row gets no draft (`lora`,
    `multimodal` or `seed`), None if it may get one. `is_sampled` is False only if the row is known to be greedy.
    `sampling`, if set, has the row's sampling parameters: the draft may then sample its tokens, for rejection sampling.
    """

    tokens: Array
    num_new: int
    name: str | None = None
    skip_cause: str | None = None
    is_sampled: bool = True
    sampling: RequestSampling | None = None


def v1_rows(runner: Any, sampled: Sequence[Sequence[int]], lengths: Array, table: Array) -> list[BatchRow]:
    """Return the rows of Model Runner V1's batch after a step that sampled the tokens `sampled`, one list for each row.

    `table` holds the tokens of all rows, `lengths` how many of them each row has. Rows with a LoRA adapter or with
    images get a `skip_cause`, because the draft model knows neither, and so do rows sampled with a seed (`is_seeded`).
    If the runner is None or not as expected, the rest of the rows have no cause and count as sampled.
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
    """Return the rows of Model Runner V2's batch after a step.

    `names` are the ids of the requests, `slots` their indices in the runner's states, and `texts` has each row's tokens
    and how many are new. `samplings` has, by row index, the sampling parameters of rows for which the draft may sample
    its tokens. Rows with a LoRA adapter or with images get a `skip_cause`, because the draft model knows neither, and
    so do rows sampled with a seed (`is_seeded`). If the runner is None, no row has a cause and all count as sampled.
    """
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
    """Return whether vLLM uses this worker's drafts: it is the last pipeline stage's first tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def broadcast(tensor: Any) -> Any:
    """Send this tensor from the first tensor-parallel rank to all others; return the first rank's values."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast(tensor, src=0)


def wrap_runners() -> None:
    """Patch vLLM's runners so that before each step they call `on_step_scheduled` of their drafter with a `StepInfo`.

    vLLM's own hook passes rows without their requests, and only after the prefill. The patch wraps the method that
    runs a step; its arguments pass through, and a drafter's `feature_hook` records the step. A second wrapper applies
    `trim_drafts` where V2's scheduler asks for the drafts. A vLLM without these methods stays as it is.
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
    """Replace a method of a class by `wrapper(method)`, unless the method is missing or wrapped already."""
    original = getattr(owner, method, None)
    if original is not None and not hasattr(original, "introduces"):
        wrapped = wrapper(original)
        wrapped.introduces = True
        setattr(owner, method, wrapped)


def drafter_of(runner: Any) -> Any:
    """Return the drafter of a runner, ours or vLLM's, None if it has none; V1 and V2 have different names for it."""
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
    """Return the `StepInfo` of vLLM's `SchedulerOutput`, without the requests of vLLM's warm-up.

    If the object is not as expected, log a warning once and return an empty `StepInfo`.
    """
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
    """Return whether all these ids belong to the requests with which Model Runner V2 compiles its kernels at start."""
    return all(name.startswith(_WARMUPS) for name in names)


def is_seeded(parameters: Any) -> bool:
    """Return whether a request samples with a seed of its own; False at temperature 0, where nothing is random.

    Such a request gets no drafts. When it is repeated, n-gram lookup would propose its first output, and verify it with
    the same random numbers that produced it, so the output would be biased. And the seed would not give the same output
    again, because with drafts the output depends on which drafts came in time.
    """
    return bool(getattr(parameters, "temperature", 0)) and getattr(parameters, "seed", None) is not None


def allows_pads(runner: Any) -> bool:
    """Return whether padding tokens (-1) in drafts leave the output of every row unchanged; False if unknown.

    Padding would change rows with a thinking budget, which reads the draft tokens of its row, and rows with a seed,
    from which vLLM draws a random number for each draft token. On the CPU, at temperatures above 0, vLLM's sampler uses
    a padding token as an index and reads outside its memory.
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
    """Work around three bugs of vLLM's rejection sampler on the CPU, if it has them; return the names replaced.

    vLLM 0.30 calls Triton's kernels, which a CPU does not have, in place of its own. `expand_batch_to_tokens` writes to
    a copy (vllm-project/vllm#55005), so its caller reads uninitialised memory as temperature, top-k and top-p of each
    draft token; above temperature 0, any speculative decoding then has a wrong output distribution.
    `apply_top_k_top_p` raises in a step without draft tokens, which ends the engine. Such steps are made faster too.

    Call this after the model runner was created: before vLLM 0.31 the runner puts the CPU's kernels in place.
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
    module.sample_recovered_tokens = _unless_undrafted(module.sample_recovered_tokens)
    return replaced


def _use_own_kernels(module: Any) -> list[str]:
    """Make the sampler `module` call its own CPU kernels where it still calls Triton's; return the names replaced."""
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
    """Return each row's value once for each of its tokens, with `replace_to` in place of `replace_from`.

    The arguments are vLLM's: `x` has one value for each row, `cu_num_tokens` the cumulative number of tokens.
    """
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


def _unless_undrafted(recover: Any) -> Any:
    """Spare steps without draft tokens the random numbers, one per sampled row and token id, that nothing reads."""
    if hasattr(recover, "__wrapped__"):
        return recover
    return functools.wraps(recover)(lambda *args, **named: recover(*args, **named) if len(args[3]) else args[3])


def check_runner(vllm_config: Any) -> None:
    """Raise `RunnerError` if V1 creates our proposer although the settings ask for V2, as in an old vLLM."""
    if vllm_config.speculative_config.method == METHOD:
        raise RunnerError(
            "`runner` is 'v2', but this vLLM runs our proposer on Model Runner V1. It takes vLLM 0.32, and the plugin "
            "'specbranch' must not be left out by VLLM_PLUGINS; or set `runner` to 'auto'"
        )


def check_context_parallelism(vllm_config: Any) -> None:
    """Raise `LayoutError` for prefill context parallelism: each rank would ask for drafts of its own, which differ."""
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size > 1:
        raise LayoutError(
            f"prefill context parallelism ({size} ranks) cannot be combined with drafts: each rank would ask for its "
            "own. Use tensor parallelism (--tensor-parallel-size), or run vLLM alone (serve --bare)"
        )


def has_adaptive_verification(vllm_config: Any) -> bool:
    """Return whether vLLM chooses for each row how many of its draft tokens to verify.

    It then chooses by the confidence that the proposer reports for each draft token.
    """
    return bool(vllm_config.speculative_config.enable_adaptive_verification)


def is_any_sampled(runner: Any, input_batch: Any) -> bool:
    """Return whether any row of Model Runner V2's batch is sampled (not greedy); False if that cannot be read."""
    try:
        return bool((runner.sampler.sampling_states.temperature.np[input_batch.idx_mapping_np] > 0).any())
    except AttributeError as error:
        _warn_of_sampler(repr(error))
        return False


def samplings(runner: Any, input_batch: Any, vocab_len: int) -> dict[int, RequestSampling]:
    """Return, by row index, the sampling parameters of the rows for which the draft may sample its tokens.

    They are the same on all ranks. Rows with a thinking budget are left out, and a whole batch in which any row has a
    grammar: both shorten a draft depending on its tokens, and then rejection sampling is not exact. Return {} if the
    runner's logits are not as wide as the vocabulary, or if its sampler is not as expected.
    """
    try:
        if input_batch.has_structured_output_reqs or _logits_len(runner, vocab_len) != vocab_len:
            return {}
        states = runner.sampler.sampling_states
        has_budget = getattr(runner.sampler.thinking_budget_state, "use_thinking_budget", None)  # None: no row has one
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
    """Return how many tokens the logits of a runner's model cover; `vocab_len` if the model does not say."""
    processor = getattr(getattr(runner, "model", None), "logits_processor", None)
    return int(getattr(processor, "org_vocab_size", vocab_len))


@functools.cache
def _warn_of_sampler(cause: str) -> None:
    log.warning("this vLLM's sampler is not as expected (%s); draft tokens are proposed as certain", cause)
