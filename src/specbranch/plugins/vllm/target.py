"""A vLLM engine inside this process, with our proposer or bare: for generating, checking and measuring.

Serving goes through `vllm serve`. In one process there is no engine core that spins beside us, so a step takes what the
model takes; on a machine with few cores that matters more than anything else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbranch.engines.options import found_model
from specbranch.plugins.vllm.compat import engine, launch, patches

PROPOSER = "specbranch.plugins.vllm.SpecBranchProposer"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What to load. `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the hub.

    `section` is our section of `additional_config`; None means bare vLLM, without our proposer. `arguments` are passed
    on to `vllm.LLM` as they are.
    """

    model: str
    section: Mapping[str, Any] | None = None
    num_speculative_tokens: int = 8
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue; `sampling` are the arguments of `vllm.SamplingParams`."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
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
        launch.run_in_this_process(len(os.sched_getaffinity(0)))
        from vllm import LLM

        arguments = {"disable_log_stats": False, **options.arguments}
        if options.section is not None:
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": options.num_speculative_tokens,
            }
            arguments["additional_config"] = {"specbranch": dict(options.section)}
        self.llm = LLM(model=found_model(options.model), **arguments)
        if "speculative_config" in arguments:
            patches.patch_cpu_sampler()  # vLLM's own methods need it as much as ours
        self._has_proposer = options.section is not None
        self._num_requests = 0

    def use(self, section: Mapping[str, Any]) -> None:
        """Let the proposer go on with other settings, from the next request on."""
        engine.proposer_of(self.llm).use(section)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a chat by the model's own template, ready for the answer."""
        tokenizer = self.llm.get_tokenizer()
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        return list(self.llm.get_tokenizer().encode(text))

    def stream(self, requests: Sequence[Request]) -> Generator[Piece, None, None]:
        """Run requests together and yield what every step adds. One caller at a time; closing it aborts the rest."""
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
                    index = indices[output.request_id]
                    logprobs = engine.reported_logprobs(part)
                    yield Piece(index, list(part.token_ids), part.text, part.finish_reason, at_s, logprobs)
                    if output.finished:
                        del indices[output.request_id]
        finally:
            llm_engine.abort_request(list(indices))

    def proposer_counts(self) -> dict[str, float]:
        """What the proposer did since it was last told what to `use`; nothing for bare vLLM."""
        return dict(engine.proposer_of(self.llm).counts()) if self._has_proposer else {}

    def draft_tokens(self) -> tuple[int, int]:
        """Draft tokens that vLLM verified since its start, and those of them that it accepted."""
        return engine.draft_tokens(self.llm)
