"""Decode the built-in prompts with one method in one engine, alone and together; write one JSON document.

A stage for each method: one that cannot be loaded here takes nothing from the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from specbranch.bench.scenario import BenchMethod
from specbranch.bench.survey import MESSAGES
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import (
    DecodedOutput,
    DecodeJob,
    DecodeResult,
    PromptRequest,
    TargetProcess,
    step_gaps_s,
)
from specbranch.plugins.vllm.settings import ProposerSettings

_WARM_UP = 16  # tokens
_CACHE_TOKENS = 32768


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """What to decode with which method. Cores are pinned on a CPU only."""

    method: BenchMethod
    target: str
    draft: str
    draft_device: str
    dtype: str
    arguments: dict[str, Any]
    num_prompts: int
    max_tokens: int
    at_once: list[int]
    target_cores: list[int] | None = None
    draft_cores: list[int] | None = None
    gamma: int = 8
    deadline_ms: float = 1000.0


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Decode)
    document = decode(options)
    Path(sys.argv[2]).write_text(json.dumps(document))


def decode(options: Decode) -> dict[str, Any]:
    """The figures of a method, and digests of its answers."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-proof-")))
        settings = None
        if options.method.planner is not None:
            service = stack.enter_context(DraftProcess(draft_options(options)))
            settings = ProposerSettings(
                address=service.address,
                planner=options.method.planner,
                settings=options.method.settings,
                is_gated=options.method.is_gated,
                deadline_ms=options.deadline_ms,
            )
        arguments = {"dtype": options.dtype, **options.arguments}
        if options.method.speculative_config is not None:
            arguments["speculative_config"] = options.method.found_speculative_config()
        target = LocalEngineOptions(options.target, settings, options.gamma, arguments)
        process = stack.enter_context(TargetProcess(target, directory / "target.log", options.target_cores))
        process.run(DecodeJob(asks(options, _WARM_UP)[:1]))
        runs = {batch: process.run(DecodeJob(asks(options, options.max_tokens), batch)) for batch in options.at_once}
        return {
            "engine": msgspec.to_builtins(process.engine),
            "dtype": options.dtype,
            "runs": {str(batch): figures(done) for batch, done in runs.items()},
        }


def draft_options(options: Decode) -> DraftServiceOptions:
    """A small cache: on a GPU that both models share, the draft starts first and would take what is free."""
    cores = options.draft_cores
    return DraftServiceOptions(
        options.draft,
        device=options.draft_device,
        cores=cores,
        threads=len(cores) if cores else None,
        extra=["--cache-tokens", str(_CACHE_TOKENS)],
    )


def asks(options: Decode, max_tokens: int) -> list[PromptRequest]:
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return [PromptRequest(message, sampling) for message in MESSAGES[: options.num_prompts]]


def figures(done: DecodeResult) -> dict[str, Any]:
    """Speed, steps, drafts and the answers' digests of one run."""
    counts, gaps = done.counts, step_gaps_s(done.answers)
    return {
        "tokens_per_s": sum(len(answer.tokens) for answer in done.answers) / done.elapsed_s,
        "step_ms": 1e3 * median(gaps) if gaps else None,
        "hook_ms": 1e3 * counts["wait_s"] / counts["calls"] if counts.get("calls") else None,
        "submitted": done.submitted,
        "accepted": done.accepted,
        "counts": counts,
        "answers": digests(done.answers),
    }


def digests(answers: Sequence[DecodedOutput]) -> list[str]:
    return [hashlib.sha256(json.dumps(answer.tokens).encode()).hexdigest()[:16] for answer in answers]


if __name__ == "__main__":
    main()
