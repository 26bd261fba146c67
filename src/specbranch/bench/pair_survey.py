"""A survey of a pair from its names: loads the target in a worker and the draft in this process, and measures both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbranch.bench.survey import Survey, take_survey
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import DraftEngine
from specbranch.engines.registry import engine_for, open_engine
from specbranch.plugins.vllm.process import TargetProcess
from specbranch.plugins.vllm.target import TargetOptions

_DRAFT_ROWS = (1, 2, 4, 8)
_TARGET_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What to measure and where. `arguments` are passed to `vllm.LLM`; cores None means not pinned."""

    target: str
    draft: str
    messages: Sequence[str]
    max_tokens: int
    dtype: str = "auto"
    draft_engine: str | None = None
    draft_device: str = "cpu"
    draft_dtype: str = "auto"
    target_cores: Sequence[int] | None = None
    draft_cores: Sequence[int] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def target_options(self) -> TargetOptions:
        """The target: bare vLLM."""
        arguments = {
            "dtype": self.dtype,
            "max_model_len": 2048,
            "max_num_seqs": max(_TARGET_BATCHES),
            "enable_prefix_caching": False,
            **self.arguments,
        }
        return TargetOptions(self.target, arguments=arguments)

    def open_draft(self, tell: Callable[[str], None]) -> DraftEngine:
        """Load the draft in this process, with one thread for each of its cores; `tell` hears what loading does."""
        options = EngineOptions(
            model=self.draft,
            device=self.draft_device,
            threads=None if self.draft_cores is None else len(self.draft_cores),
            dtype=self.draft_dtype,
            tell=lambda stage: tell(f"draft: {stage}"),
        )
        return open_engine(self.draft_engine or engine_for(self.draft), options)


def survey_pair(options: PairOptions, tell: Callable[[str], None]) -> Survey:
    """Load both models, measure them, and unload them; `tell` hears the stages."""
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="specbranch-plan-") as directory:
        tell("loading the target")
        with TargetProcess(options.target_options(), Path(directory) / "target.log", options.target_cores) as process:
            tell("loading the draft")
            try:
                if options.draft_cores is not None:
                    os.sched_setaffinity(0, options.draft_cores)
                engine = options.open_draft(tell)
                try:
                    return take_survey(
                        process, engine, options.messages, _TARGET_BATCHES, _DRAFT_ROWS, options.max_tokens, tell
                    )
                finally:
                    engine.shutdown()
            finally:
                os.sched_setaffinity(0, before)
