"""A vLLM engine inside this process, with our proposer or bare: for generating, checking and measuring.

Serving goes through `vllm serve`. In one process no engine core spins beside the model, so a step takes only as long
as the model; on a machine with few cores that matters most. Several workers have processes of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbranch.engines.models import found_model
from specbranch.plugins.vllm.arguments import proposer_arguments
from specbranch.plugins.vllm.binding import threads
from specbranch.plugins.vllm.compat import engine, launch
from specbranch.plugins.vllm.layout import Layout
from specbranch.plugins.vllm.settings import ProposerSettings


@dataclass(frozen=True, slots=True)
class TargetOptions:
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
class Piece:
    """What one engine step added to one request: all but the last of the tokens were drafted and accepted."""

    index: int
    tokens: list[int]
    text: str
    finish_reason: str | None
    at_s: float
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each token, if the request asked for them


class Target:
    """The engine. Its environment is set here, so no vLLM may have been imported in this process before."""

    def __init__(self, options: TargetOptions) -> None:
        arguments = options.all_arguments()
        cores = sorted(os.sched_getaffinity(0))
        launch.run_in_this_process(threads(cores, Layout.of_arguments(arguments)) if launch.runs_on_cpu() else {})
        if options.is_exact and not launch.be_batch_invariant():
            arguments["dtype"] = "float32"
        from vllm import LLM

        self.llm = LLM(model=found_model(options.model), **arguments)
        engine.ignore_interrupts(self.llm)
        if arguments.get("speculative_config"):
            engine.patch_cpu_sampler(self.llm)  # vLLM's own methods need it as much as ours
        self._has_proposer = options.settings is not None
        self._num_requests = 0

    def close(self) -> None:
        """End the engine and its workers."""
        engine.shut_down(self.llm)

    def use(self, settings: ProposerSettings) -> None:
        """Give the proposer other settings, from the next request on."""
        engine.use(self.llm, settings)

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

    def stream(self, requests: Sequence[Request]) -> Generator[Piece, None, None]:
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
                    yield Piece(
                        index=indices[output.request_id],
                        tokens=list(part.token_ids),
                        text=part.text,
                        finish_reason=part.finish_reason,
                        at_s=at_s,
                        logprobs=engine.reported_logprobs(part),
                    )
                    if output.finished:
                        del indices[output.request_id]
        finally:
            llm_engine.abort_request(list(indices))

    def proposer_counts(self) -> dict[str, float]:
        """The proposer's counters since its settings last changed; empty for bare vLLM."""
        return engine.proposer_counts(self.llm) if self._has_proposer else {}

    def draft_tokens(self) -> tuple[int, int]:
        """Draft tokens that vLLM verified and accepted since its start."""
        return engine.draft_tokens(self.llm)
