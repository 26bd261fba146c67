"""A vLLM engine inside this process, with our plugin or bare.

Servers use `vllm serve` instead. In one process no separate engine core busy-waits next to the model, so a step takes
only as long as the model does; that matters most on a machine with few cores. Several workers still have processes of
their own.

A function that runs in a worker takes the worker as its first argument, and is defined at the top level of this module
so that vLLM can send it to another process by name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from specbranch.engines.models import resolve_model
from specbranch.errors import SpecBranchError
from specbranch.launch.placement import omp_env
from specbranch.plugins.vllm import compat, installed
from specbranch.plugins.vllm.settings import ParallelLayout, ProposerSettings, proposer_arguments


@dataclass(frozen=True, slots=True)
class LocalEngineOptions:
    """The engine to load. `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the hub.

    Without `settings` it is bare vLLM, without our proposer. `arguments` are passed to `vllm.LLM` as they are.
    `is_exact`: tokens must not depend on the batch that they are computed in. vLLM's batch-invariant kernels are used
    if this device has them; otherwise the model runs in float32, where rounding hardly ever changes a token.
    """

    model: str
    settings: ProposerSettings | None = None
    num_speculative_tokens: int = 8
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = False

    def all_arguments(self) -> dict[str, Any]:
        """Return all arguments of `vllm.LLM` except the model."""
        arguments = {"disable_log_stats": False, **self.arguments}
        if self.settings is not None:
            ours = proposer_arguments(self.settings, self.num_speculative_tokens)
            section = {**arguments.get("additional_config", {}), **ours["additional_config"]}
            arguments |= {**ours, "additional_config": section}
        return arguments


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue; `sampling` are the arguments of `vllm.SamplingParams`."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The tokens that one engine step added to one request: all but the last were drafted and accepted.

    `index` is the request's index among those given to `stream`, `finish_reason` is None until the request has
    finished, and `at_s` is the time of the step by `time.monotonic`.
    """

    index: int
    tokens: list[int]
    text: str
    finish_reason: str | None
    at_s: float
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each token, if requested


class LocalEngine:
    """A vLLM engine that is loaded in this process.

    The constructor sets vLLM's environment, so this process must not have imported vLLM before.
    """

    def __init__(self, options: LocalEngineOptions) -> None:
        arguments = options.all_arguments()
        cores = sorted(os.sched_getaffinity(0))
        installed.run_in_this_process(
            omp_env(cores, ParallelLayout.of_arguments(arguments)) if installed.runs_on_cpu() else {}
        )
        if options.is_exact and not installed.be_batch_invariant():
            arguments["dtype"] = "float32"
        from vllm import LLM

        self.llm = LLM(model=resolve_model(options.model), **arguments)
        ignore_interrupts(self.llm)
        if arguments.get("speculative_config"):
            patch_cpu_sampler(self.llm)  # vLLM's own speculative methods need it too
        self._has_proposer = options.settings is not None
        self._num_requests = 0

    def close(self) -> None:
        """End the engine and its workers."""
        shut_down(self.llm)

    def configure(self, settings: ProposerSettings) -> None:
        """Give the proposer new settings, which apply from the next request on."""
        configure_proposers(self.llm, settings)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a chat in the model's own template, up to the start of the answer."""
        tokenizer = self.llm.get_tokenizer()
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.llm.get_tokenizer().encode(text))

    def stream(self, requests: Sequence[Request]) -> Generator[StepOutput, None, None]:
        """Decode requests together; yield for every step the output of each request that it extended.

        Only one stream may be open at a time; closing it aborts the requests that have not finished.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm_engine = self.llm.llm_engine
        indices: dict[str, int] = {}
        for index, request in enumerate(requests):
            self._num_requests += 1
            name = str(self._num_requests)
            indices[name] = index
            params = SamplingParams(**request.sampling, output_kind=RequestOutputKind.DELTA)
            llm_engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, params)
        try:
            while llm_engine.has_unfinished_requests():
                outputs = llm_engine.step()
                at_s = time.monotonic()
                for output in outputs:
                    (part,) = output.outputs
                    yield StepOutput(
                        index=indices[output.request_id],
                        tokens=list(part.token_ids),
                        text=part.text,
                        finish_reason=part.finish_reason,
                        at_s=at_s,
                        logprobs=reported_logprobs(part),
                    )
                    if output.finished:
                        del indices[output.request_id]
        finally:
            llm_engine.abort_request(list(indices))

    def proposer_counts(self) -> dict[str, float]:
        """Return the proposer's counters since its settings last changed; empty for bare vLLM."""
        return proposer_counts(self.llm) if self._has_proposer else {}

    def draft_tokens(self) -> tuple[int, int]:
        """Return the numbers of draft tokens that vLLM has verified and accepted since its start."""
        return draft_tokens(self.llm)


class WorkerError(SpecBranchError, RuntimeError):
    """A call into a worker of vLLM has failed; the message names the cause."""


def configure_proposers(llm: Any, settings: ProposerSettings) -> None:
    """Give the proposers of all workers new settings; raise `WorkerError` if one refuses them."""
    errors = [error for error in llm.collective_rpc(_configure_proposer, args=(settings,)) if error is not None]
    if errors:
        raise WorkerError(errors[0])


def proposer_counts(llm: Any) -> dict[str, float]:
    """Return the counters of the proposer that drafts; the proposers of other workers have none."""
    return {name: count for counts in llm.collective_rpc(_counts) for name, count in counts.items()}


def patch_cpu_sampler(llm: Any) -> None:
    """Run `compat.patch_cpu_sampler`, which replaces faulty functions of vLLM's sampler on the CPU, in all workers."""
    llm.collective_rpc(_patch_cpu_sampler)


def ignore_interrupts(llm: Any) -> None:
    """Make workers in other processes ignore Ctrl-C: it is meant for this process, which may continue."""
    llm.collective_rpc(_ignore_interrupts)


def shut_down(llm: Any) -> None:
    """End the engine and its workers; vLLM would log an error if they ended with this process instead."""
    llm.llm_engine.engine_core.shutdown()


def _configure_proposer(worker: Any, settings: ProposerSettings) -> str | None:
    # A worker must not raise: vLLM would then mistake the answers of the other workers for answers to the next call.
    try:
        compat.drafter_of(worker.model_runner).configure(settings)
    except Exception as error:
        return str(error) or repr(error)
    return None


def _counts(worker: Any) -> dict[str, float]:
    counts: dict[str, float] = compat.drafter_of(worker.model_runner).counts()
    return counts


def _num_pads(worker: Any) -> int:
    # Bare vLLM has no drafter, and its own drafters do not pad.
    return int(getattr(compat.drafter_of(worker.model_runner), "num_pads", 0))


def _patch_cpu_sampler(worker: Any) -> None:
    compat.patch_cpu_sampler()


def _ignore_interrupts(worker: Any) -> None:
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def draft_tokens(llm: Any) -> tuple[int, int]:
    """Return the numbers of draft tokens that vLLM has verified and accepted since its start.

    They are from vLLM's counters, minus the padding tokens that vLLM has counted as draft tokens.
    """
    totals = {"vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    submitted, accepted = totals.values()
    return submitted - sum(llm.collective_rpc(_num_pads)), accepted


def reported_logprobs(completion: Any) -> list[dict[int, float]]:
    """Return the log-probabilities that vLLM reports for each token of a completion; empty if none were requested."""
    return [{token: float(one.logprob) for token, one in position.items()} for position in completion.logprobs or []]


def structured_outputs(schema: dict[str, Any]) -> Any:
    """Return the sampling parameter that restricts an output to JSON of this schema."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def describe_engine(llm: Any) -> Engine:
    """Return the properties of a loaded engine; `llm` is a `vllm.LLM`."""
    import torch
    import transformers
    import vllm

    config = llm.llm_engine.vllm_config
    return Engine(
        {module.__name__: str(module.__version__) for module in (vllm, torch, transformers)},
        str(config.model_config.dtype).removeprefix("torch."),
        str(config.device_config.device_type),
        is_eager=bool(config.model_config.enforce_eager),
        is_invariant=installed.is_batch_invariant(),
    )


class Engine(msgspec.Struct, frozen=True):
    """The properties of a loaded engine.

    `is_eager`: neither compiled nor run from CUDA graphs. `is_invariant`: the results for a position do not depend on
    the batch.
    """

    versions: dict[str, str]
    dtype: str
    device: str
    is_eager: bool = False
    is_invariant: bool = False

    @property
    def computes_in(self) -> str:
        """A phrase for reports: the dtype, preceded by "batch-invariant" if the kernels are."""
        return f"batch-invariant {self.dtype}" if self.is_invariant else self.dtype
