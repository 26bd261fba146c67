"""Measure a pair of models on this machine: step times, and the draft's distributions along the target's answers.

Two devices are seldom independent: on one CPU they share memory, and each slows the other. So the target is timed both
alone and while the draft works, and the draft only while the target works.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from specbranch.bench.profile import measure
from specbranch.core.distribution import Distribution
from specbranch.core.planners import DEFAULT_PLANNER, draft_length_limit
from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.registry import engine_for, open_engine
from specbranch.launch.child import pinned
from specbranch.launch.draft_process import DraftServiceOptions, OnProgress
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodedOutput as Decoded
from specbranch.launch.vllm_worker import DecodeJob, PromptRequest, TargetProcess, step_gaps_s
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.trace import Answer, Header, Trace

MESSAGES = (
    "Write a Python function that returns the n-th prime number.",
    "Write a Python class for a queue with two stacks, with docstrings.",
    "Write a SQL query for the three best customers of each month.",
    "Write a regular expression for dates such as 2024-02-29 and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. It stops twice, 7 minutes each. How long does it move?",
    "Anna has 3 boxes of 24 pencils and gives away a third of all. How many are left? Think step by step.",
    "A shirt costs 40 euros after a discount of 20 %. What did it cost before?",
    "What is the sum of the first 50 odd numbers? Show why.",
    "Explain to a child why the moon changes its shape.",
    "Give me five tips for a first job interview.",
    "Write a short letter to a neighbour whose dog barks at night.",
    "What are the advantages of a heat pump over a gas boiler?",
    "Describe a quiet morning in a small harbour town.",
    "Compare lists and tuples in Python.",
    "Translate into French: Good morning, I would like two tickets to Lyon, please.",
    "Summarise in two sentences how vaccines work.",
)
_STEP_TOKENS = 24
_PIECE_LEN = 256
_AT_ONCE = 8
_CONTEXT_LEN = 192

_Pair = tuple[list[int], list[int]]  # tokens of a prompt, and of the target's answer
_DRAFT_ROWS = (1, 2, 4, 8)
_TARGET_BATCHES = (1, 2, 4, 8, 16)
_TYPE_BATCHES = (1, 2, 8)  # for each further data type of the target: enough for a line


class StepTimes(NamedTuple):
    """Measured step times in seconds; the fields are those of `Survey` with the same names."""

    target_alone_s: Mapping[int, float]
    target_beside_s: float
    draft_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Survey:
    """The measurements of a pair of models: step times in seconds, and a trace.

    The target's times are by the number of requests in its batch, the draft's by the number of rows in its step. The
    target is bare vLLM. If vLLM with our proposer and without drafts was timed too, `hooked_s` has its times. The trace
    holds the target's answers with the draft's distributions.
    """

    target_alone_s: Mapping[int, float]
    target_beside_s: float  # of one token, while the draft works
    draft_s: Mapping[int, float]  # while the target works
    trace: Trace
    hooked_s: Mapping[int, float] = field(default_factory=dict)  # of the target with our proposer, without drafts

    def as_json(self) -> dict[str, Any]:
        """Return the step times and the trace's statistics as a JSON dict.

        They are the share of tokens that the draft ranked first, the share among its first three, and the token count.
        """
        return {
            "target_alone_ms": {str(tokens): 1e3 * step_s for tokens, step_s in self.target_alone_s.items()},
            "target_beside_ms": 1e3 * self.target_beside_s,
            "hooked_ms": {str(tokens): 1e3 * step_s for tokens, step_s in self.hooked_s.items()},
            "draft_ms": {str(rows): 1e3 * step_s for rows, step_s in self.draft_s.items()},
            "agreement": self.trace.match_share(),
            "in_first_three": self.trace.match_share(3),
            "tokens": self.trace.num_tokens,
        }


def take_survey(
    target: TargetProcess,
    engine: DraftEngine,
    messages: Sequence[str],
    sizes: Sequence[int],
    rows: Sequence[int],
    answer_len: int,
    on_progress: OnProgress,
) -> Survey:
    """Time a target in its process and a draft engine in this one, and return the survey of this pair.

    The target is timed with each of `sizes` requests at once, the draft with each of `rows` rows. The survey's trace
    has the target's answers to `messages`, at most `answer_len` tokens each, with the draft's distributions. Call
    `on_progress` with a phrase on each stage.
    """
    steps = take_step_times(target, engine, messages, sizes, rows, on_progress)
    pairs: list[_Pair] = []
    for start in range(0, len(messages), max(sizes)):
        on_progress(f"answers, {start} of {len(messages)}")
        group = messages[start : start + max(sizes)]
        decoded = _decode(target, group, answer_len, goes_on=False)
        pairs += [(one.prompt, one.tokens) for one in decoded]
    return Survey(*steps, record_distributions(engine, pairs, on_progress))


def take_step_times(
    target: TargetProcess,
    engine: DraftEngine,
    messages: Sequence[str],
    sizes: Sequence[int],
    rows: Sequence[int],
    on_progress: OnProgress,
) -> StepTimes:
    """Time the steps of the target alone, and of target and draft while both work; return the median times.

    The target is timed alone with each of `sizes` requests at once, the draft with each of `rows` rows.
    """
    alone_s: dict[int, list[float]] = {size: [] for size in sizes}
    _decode(target, messages[:1], _STEP_TOKENS, goes_on=True)  # warm-up
    # The target is timed alone before and after the time together, so that a slow change of the machine affects both.
    for size in sizes[::-1]:
        on_progress(f"target, {size} at once")
        alone_s[size] += _steps_s(target, messages, size)
    on_progress("target beside the draft")
    beside_s, draft_s = _together(target, engine, messages[0], 4 * _STEP_TOKENS, rows)
    for size in sizes:
        on_progress(f"target, {size} at once, again")
        alone_s[size] += _steps_s(target, messages, size)
    return StepTimes({size: median(times_s) for size, times_s in alone_s.items()}, beside_s, draft_s)


def time_steps(
    target: TargetProcess, messages: Sequence[str], sizes: Sequence[int], on_progress: OnProgress
) -> dict[int, float]:
    """Time a target with our proposer, and return its median step time in seconds by the number of requests at once."""
    _decode(target, messages[:1], _STEP_TOKENS, goes_on=True)  # warm-up
    times_s = {}
    for size in sizes:
        on_progress(f"target with the hook, {size} at once")
        times_s[size] = median(_steps_s(target, messages, size))
    return times_s


def record_distributions(
    engine: DraftEngine, pairs: Sequence[_Pair], on_progress: OnProgress = lambda stage: None
) -> Trace:
    """Run the draft along given answers, and return a trace with its distribution before every token of an answer.

    `pairs` has the tokens of each prompt and of its answer.
    """
    answers = []
    for start in range(0, len(pairs), _AT_ONCE):
        on_progress(f"the draft's distributions, {start} of {len(pairs)} answers")
        group = pairs[start : start + _AT_ONCE]
        handles = [engine.open() for _ in group]
        distributions = [[_read(engine, handle, prompt)] for handle, (prompt, _) in zip(handles, group, strict=True)]
        for place in range(max(len(answer) for _, answer in group) - 1):
            active = [index for index, (_, answer) in enumerate(group) if place + 1 < len(answer)]
            rows = [Row(handles[index], (group[index][1][place],)) for index in active]
            for index, distribution in zip(active, engine.run(rows), strict=True):
                distributions[index].append(distribution)
        for handle in handles:
            engine.close(handle)
        answers += [
            Answer(tuple(answer), tuple(own), tuple(prompt))
            for (prompt, answer), own in zip(group, distributions, strict=True)
        ]
    return Trace(Header(draft=engine.info.model, task="survey"), tuple(answers))


def _read(engine: DraftEngine, handle: int, prompt: Sequence[int]) -> Distribution:
    """Prefill a whole prompt in chunks, and return the engine's distribution after its last token."""
    for start in range(0, len(prompt), _PIECE_LEN):
        (distribution,) = engine.run([Row(handle, tuple(prompt[start : start + _PIECE_LEN]))])
    return distribution


def _together(
    target: TargetProcess, engine: DraftEngine, message: str, num_tokens: int, rows: Sequence[int]
) -> tuple[float, dict[int, float]]:
    """Run target and draft at once; return the target's median step time and the draft's by row count, in seconds.

    The target answers `message` with `num_tokens` tokens, and the draft is timed until the answer is complete.
    """
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(_decode, target, [message], num_tokens, goes_on=True)
        timings = measure(engine, rows, _CONTEXT_LEN, 4, is_enough=answers.done)
        return median(_gaps_s(answers.result())), {count: spread.median_s for count, spread in timings.by_rows.items()}


def _decode(target: TargetProcess, messages: Sequence[str], num_tokens: int, goes_on: bool) -> list[Decoded]:
    """Have the target answer these messages greedily, with at most `num_tokens` tokens each; return the answers.

    With `goes_on`, answers continue past their natural end, so that the batch keeps its size.
    """
    sampling = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": goes_on}
    return target.run(DecodeJob([PromptRequest(message, sampling, is_chat=True) for message in messages])).answers


def _steps_s(target: TargetProcess, messages: Sequence[str], size: int) -> list[float]:
    """Run `size` requests at once, and return the times between the target's steps in seconds."""
    asked = [messages[index % len(messages)] for index in range(size)]
    return _gaps_s(_decode(target, asked, _STEP_TOKENS, goes_on=True))


def _gaps_s(decoded: Sequence[Decoded]) -> list[float]:
    """Return the seconds between steps, without the first steps of each answer, which include prefill."""
    return step_gaps_s(decoded, skip=len(decoded))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """The options of a survey: the pair, the prompts (`messages`), and where both models run.

    Answers have at most `max_tokens` tokens. Without cores a model is not pinned. `arguments` are passed to `vllm.LLM`.
    `times_hook`: also time vLLM with our proposer and without drafts. By default this is left out on a CPU, where it
    computes exactly as bare vLLM does.
    """

    target: str
    draft: DraftServiceOptions
    messages: Sequence[str]
    max_tokens: int
    dtype: str = "auto"
    target_cores: Sequence[int] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    times_hook: bool = field(default_factory=lambda: not installed.runs_on_cpu())

    def target_options(self, has_hook: bool = False) -> LocalEngineOptions:
        """Return the options of the target: bare vLLM, or with `has_hook` vLLM with our proposer and without drafts."""
        arguments = {
            "dtype": self.dtype,
            "max_model_len": 2048,
            "max_num_seqs": max(_TARGET_BATCHES),
            "enable_prefix_caching": False,
            **self.arguments,
        }
        settings = ProposerSettings(planner="none", is_gated=False) if has_hook else None
        return LocalEngineOptions(self.target, settings, draft_length_limit(DEFAULT_PLANNER), arguments)

    def open_draft(self, on_progress: OnProgress) -> DraftEngine:
        """Load and return the draft's engine, with a thread for each of its cores; call `on_progress` at each stage."""
        options = EngineOptions(
            model=self.draft.model,
            device=self.draft.device,
            threads=None if self.draft.cores is None else len(self.draft.cores),
            dtype=self.draft.dtype,
            on_progress=lambda stage: on_progress(f"draft: {stage}"),
        )
        return open_engine(self.draft.engine or engine_for(self.draft.model), options)


def survey_types(options: PairOptions, dtypes: Sequence[str], on_progress: OnProgress) -> dict[str, Survey]:
    """Measure a pair with its target in each data type, one after the other, and return the surveys by data type.

    Answers and the draft's distributions are recorded in the first type only, because rounding hardly changes them.
    Call `on_progress` at each stage.
    """
    first, *others = dtypes
    surveys = {first: survey_pair(replace(options, dtype=first), on_progress)}
    for dtype in others:
        surveys[dtype] = _with_steps_of(surveys[first], replace(options, dtype=dtype), on_progress)
    return surveys


def _with_steps_of(survey: Survey, options: PairOptions, on_progress: OnProgress) -> Survey:
    """Load the pair of these options, time its steps, and return a copy of `survey` with these step times."""
    with _loaded(options, on_progress) as (target, engine):
        steps = take_step_times(target, engine, options.messages, _TYPE_BATCHES, _DRAFT_ROWS, on_progress)
    return replace(survey, **steps._asdict())


def survey_pair(options: PairOptions, on_progress: OnProgress) -> Survey:
    """Load both models, measure them, unload them, and return the survey; call `on_progress` at each stage."""
    with _loaded(options, on_progress) as (target, engine):
        survey = take_survey(
            target, engine, options.messages, _TARGET_BATCHES, _DRAFT_ROWS, options.max_tokens, on_progress
        )
    if not options.times_hook:
        return survey
    on_progress("loading the target with the hook")
    with _target_of(options, has_hook=True) as target:
        return replace(survey, hooked_s=time_steps(target, options.messages, _TARGET_BATCHES, on_progress))


@contextmanager
def _loaded(options: PairOptions, on_progress: OnProgress) -> Iterator[tuple[TargetProcess, DraftEngine]]:
    """Load the target in its own process and the draft's engine in this one, yield both, and unload them at the end.

    Meanwhile this thread is pinned to the draft's cores. No draft service is started, because it would answer with
    tokens, and a survey needs single steps with their distributions.
    """
    on_progress("loading the target" if options.dtype == "auto" else f"loading the target in {options.dtype}")
    with _target_of(options) as target, pinned(options.draft.cores):
        on_progress("loading the draft")
        engine = options.open_draft(on_progress)
        try:
            yield target, engine
        finally:
            engine.shutdown()


@contextmanager
def _target_of(options: PairOptions, has_hook: bool = False) -> Iterator[TargetProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="specbranch-plan-") as directory,
        TargetProcess(options.target_options(has_hook), Path(directory) / "target.log", options.target_cores) as target,
    ):
        yield target
