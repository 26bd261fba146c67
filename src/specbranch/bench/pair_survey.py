"""A survey of a pair from its names: loads the target in a worker and the draft in this process, and measures both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbranch.bench.survey import Survey, take_step_times, take_survey, time_steps
from specbranch.core.planners import DEFAULT_PLANNER, longest_submission
from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.engines.registry import engine_for, open_engine
from specbranch.launch.vllm_engine import TargetOptions
from specbranch.launch.vllm_worker import TargetProcess
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings

_DRAFT_ROWS = (1, 2, 4, 8)
_TARGET_BATCHES = (1, 2, 4, 8, 16)
_TYPE_BATCHES = (1, 2, 8)  # for each further data type of the target: a line needs no more


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What to measure and where. `arguments` are passed to `vllm.LLM`; cores None means not pinned.

    `times_hook`: vLLM is also timed with our proposer and without drafts. On a CPU it computes just as bare vLLM does.
    """

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
    times_hook: bool = field(default_factory=lambda: not installed.runs_on_cpu())

    def target_options(self, has_hook: bool = False) -> TargetOptions:
        """The target: bare vLLM, or with our proposer, which drafts nothing."""
        arguments = {
            "dtype": self.dtype,
            "max_model_len": 2048,
            "max_num_seqs": max(_TARGET_BATCHES),
            "enable_prefix_caching": False,
            **self.arguments,
        }
        settings = ProposerSettings(planner="none", is_gated=False) if has_hook else None
        return TargetOptions(self.target, settings, longest_submission(DEFAULT_PLANNER), arguments)

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


def survey_types(options: PairOptions, dtypes: Sequence[str], tell: Callable[[str], None]) -> dict[str, Survey]:
    """Survey a pair with its target in each data type, one after the other; `tell` hears the stages.

    Answers and the draft's distributions are taken in the first type only: rounding hardly changes them.
    """
    first, *others = dtypes
    surveys = {first: survey_pair(replace(options, dtype=first), tell)}
    for dtype in others:
        surveys[dtype] = _with_steps_of(surveys[first], replace(options, dtype=dtype), tell)
    return surveys


def _with_steps_of(survey: Survey, options: PairOptions, tell: Callable[[str], None]) -> Survey:
    """Time the steps of these options' target; everything else is as in the survey."""
    with tempfile.TemporaryDirectory(prefix="specbranch-plan-") as directory:
        tell(f"loading the target in {options.dtype}")
        log = Path(directory) / "target.log"
        with (
            TargetProcess(options.target_options(), log, options.target_cores) as process,
            _draft_of(options, tell) as engine,
        ):
            steps = take_step_times(process, engine, options.messages, _TYPE_BATCHES, _DRAFT_ROWS, tell)
    return replace(survey, **steps._asdict())


def survey_pair(options: PairOptions, tell: Callable[[str], None]) -> Survey:
    """Load both models, measure them, and unload them; `tell` hears the stages."""
    with tempfile.TemporaryDirectory(prefix="specbranch-plan-") as directory:
        tell("loading the target" if options.dtype == "auto" else f"loading the target in {options.dtype}")
        log = Path(directory) / "target.log"
        with (
            TargetProcess(options.target_options(), log, options.target_cores) as process,
            _draft_of(options, tell) as engine,
        ):
            survey = take_survey(
                process, engine, options.messages, _TARGET_BATCHES, _DRAFT_ROWS, options.max_tokens, tell
            )
        if not options.times_hook:
            return survey
        tell("loading the target with the hook")
        with TargetProcess(options.target_options(has_hook=True), log, options.target_cores) as process:
            return replace(survey, hooked_s=time_steps(process, options.messages, _TARGET_BATCHES, tell))


@contextmanager
def _draft_of(options: PairOptions, tell: Callable[[str], None]) -> Iterator[DraftEngine]:
    """Load the draft in this process, on its cores, which are the process's for as long."""
    before = os.sched_getaffinity(0)
    tell("loading the draft")
    try:
        if options.draft_cores is not None:
            os.sched_setaffinity(0, options.draft_cores)
        engine = options.open_draft(tell)
        try:
            yield engine
        finally:
            engine.shutdown()
    finally:
        os.sched_setaffinity(0, before)
