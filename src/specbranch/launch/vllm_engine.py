"""A vLLM engine inside this process, with our plugin or bare.

Serving goes through `vllm serve`. In one process no engine core spins beside the model, so a step takes only as long
as the model; on a machine with few cores that matters most. Several workers have processes of their own.

Functions that run in a worker get it as their first argument, and are named here, so that another process finds them.
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
    """What to load. `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the hub.

    `settings` None means bare vLLM, without our proposer. `arguments` are passed on to `vllm.LLM` as they are.
    `is_exact`: a token must not depend on the batch that it is computed in. vLLM's batch-invariant kernels are used
    where this device has them; elsewhere the model runs in float32, where rounding hardly ever decides.
    """

    model: str
    settings: ProposerSettings | None = None
    num_speculative_tokens: int = 8
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = False

    def all_arguments(self) -> dict[str, Any]:
        """All arguments of `vllm.LLM` but the model."""
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
    """What one engine step added to one request: all but the last of the tokens were drafted and accepted."""

    index: int
    tokens: list[int]
    text: str
    finish_reason: str | None
    at_s: float
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each token, if the request asked for them


class LocalEngine:
    """The engine. Its environment is set here, so no vLLM may have been imported in this process before."""

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
            patch_cpu_sampler(self.llm)  # vLLM's own methods need it as much as ours
        self._has_proposer = options.settings is not None
        self._num_requests = 0

    def close(self) -> None:
        """End the engine and its workers."""
        shut_down(self.llm)

    def configure(self, settings: ProposerSettings) -> None:
        """Give the proposer other settings, from the next request on."""
        use(self.llm, settings)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a chat by the model's own template, ready for the answer."""
        tokenizer = self.llm.get_tokenizer()
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.llm.get_tokenizer().encode(text))

    def stream(self, requests: Sequence[Request]) -> Generator[StepOutput, None, None]:
        """Decode requests together and yield what every step adds. One caller at a time; closing it aborts the rest."""
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
        """The proposer's counters since its settings last changed; empty for bare vLLM."""
        return proposer_counts(self.llm) if self._has_proposer else {}

    def draft_tokens(self) -> tuple[int, int]:
        """Draft tokens that vLLM verified and accepted since its start."""
        return draft_tokens(self.llm)


class WorkerError(SpecBranchError, RuntimeError):
    """What a worker of vLLM was asked to do has failed there; the message says why."""


def use(llm: Any, settings: ProposerSettings) -> None:
    """Give the proposers of all workers other settings; wrong ones raise."""
    faults = [fault for fault in llm.collective_rpc(_use, args=(settings,)) if fault is not None]
    if faults:
        raise WorkerError(faults[0])


def proposer_counts(llm: Any) -> dict[str, float]:
    """The counters of the proposer that drafts; those of other workers have none."""
    return {name: count for counts in llm.collective_rpc(_counts) for name, count in counts.items()}


def patch_cpu_sampler(llm: Any) -> None:
    """Work around bugs of vLLM's sampler in all workers; see `patches`."""
    llm.collective_rpc(_patch_cpu_sampler)


def ignore_interrupts(llm: Any) -> None:
    """Let workers in other processes ignore Ctrl-C: it is for the process that asks them, which may want to go on."""
    llm.collective_rpc(_ignore_interrupts)


def shut_down(llm: Any) -> None:
    """End the engine and its workers. They would end with this process too, but vLLM would call that an error."""
    llm.llm_engine.engine_core.shutdown()


def _use(worker: Any, settings: ProposerSettings) -> str | None:
    # An error must not be raised in a worker: vLLM would take the answers of the others for those of the next call.
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
    """Draft tokens that vLLM verified and accepted since its start, by its own counters, without pads."""
    totals = {"vllm:spec_decode_num_draft_tokens": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    submitted, accepted = totals.values()
    return submitted - sum(llm.collective_rpc(_num_pads)), accepted


def reported_logprobs(completion: Any) -> list[dict[int, float]]:
    """The log-probabilities that vLLM reports for each token of a completion; empty if none were asked for."""
    return [{token: float(one.logprob) for token, one in position.items()} for position in completion.logprobs or []]


def json_shape(schema: dict[str, Any]) -> Any:
    """The sampling parameter that restricts an output to JSON of this schema."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def describe(llm: Any) -> Engine:
    """The engine's versions, dtype and device, and how it computes."""
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
    """What a loaded engine says of itself.

    `is_eager`: neither compiled nor run from CUDA graphs. `is_invariant`: a position is computed the same in any batch.
    """

    versions: dict[str, str]
    dtype: str
    device: str
    is_eager: bool = False
    is_invariant: bool = False

    @property
    def computes_in(self) -> str:
        """The number format, and what is special about it."""
        return f"batch-invariant {self.dtype}" if self.is_invariant else self.dtype
