"""`specbranch check`: decode the same requests with bare and drafting engines, and report on the outputs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specbranch.core.planners import DEFAULT_PLANNER, setting_names
from specbranch.exactness.prompts import FEATURES, STOP, TOSS_KEYS, UNDRAFTED, Feature, greedy_prompts
from specbranch.exactness.vllm_findings import (
    FAILED,
    Finding,
    check_property,
    divergence_rates,
    drop_truncated,
    greedy_equality,
    has_all_logprobs,
    is_json,
    logprob_agreement,
    same_distribution,
    seeds_repeat,
)
from specbranch.extensions import load_extensions
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import Engine, LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, DecodeResult, PromptRequest, TargetProcess
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings, merged_settings
from specbranch.version import __version__

_BATCH = 8  # for sampled requests, and for the greedy runs that measure vLLM's own rounding
_MAX_ROWS = 16
_ATTEMPTS = 4  # repeats of a run with drafts until a draft token is accepted
_SAMPLED_GAMMA = 2  # draft length for sampled requests, whose outputs are too short for longer drafts
Listener = Callable[[str, int | None, int | None], None]  # stage, requests done, all requests; None if unknown


@dataclass(frozen=True, slots=True)
class CheckSize:
    """The number of requests of each kind to decode, and the maximum of tokens in a greedy output.

    More samples detect smaller differences of distributions.
    """

    num_prompts: int = 32
    num_tokens: int = 40
    num_samples: int = 400
    num_repeats: int = 16


FULL, QUICK = CheckSize(), CheckSize(8, 24, 64, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of a check: target and draft, how to serve them, and how much to decode.

    `alpha` is the probability of a false alarm in the whole report. `arguments` are passed to `vllm.LLM`.
    `wrong_temperature`, if set, is the temperature of samples with the proposer instead of 1, to test that the check
    then fails.
    """

    target: str
    draft: DraftServiceOptions
    planners: Sequence[str] = (DEFAULT_PLANNER,)
    dtype: str = "auto"
    num_speculative_tokens: int = 4
    deadline_ms: float = 2000.0
    alpha: float = 1e-3
    seed: int = 0
    size: CheckSize = FULL
    target_cores: Sequence[int] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wrong_temperature: float | None = None
    predictor: str = "confidence"

    def settings(self, address: str) -> ProposerSettings:
        """Return the proposer's settings for a draft service at `address`, with the first of the check's `planners`."""
        ours = {
            "address": address,
            "is_gated": False,
            "deadline_ms": self.deadline_ms,
            "planner": self.planners[0],
            "predictor": self.predictor,
        }
        return merged_settings(ours, self.arguments.get("additional_config", {}))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check: all findings, the options, the engine, and the seconds that each stage took."""

    options: CheckOptions
    engine: Engine
    findings: Sequence[Finding]
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.result == FAILED for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON dict."""
        options = self.options
        return {
            "holds": not self.has_failed,
            "target": options.target,
            "draft": options.draft.model,
            "planners": list(options.planners),
            "predictor": options.predictor,
            "alpha": options.alpha,
            "seed": options.seed,
            "size": asdict(options.size),
            "versions": {"specbranch": __version__, **self._served_with()},
            "stage_s": {name: round(seconds, 1) for name, seconds in self.stage_s.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def _served_with(self) -> dict[str, str]:
        engine = self.engine
        how = "eager" if engine.is_eager else "compiled"
        return {"vllm": engine.versions["vllm"], "dtype": engine.dtype, "device": engine.device, "how": how}


def check(options: CheckOptions, listen: Listener) -> Report:
    """Start the draft service, then four engines one after the other, and return a report on their outputs.

    The first two engines test exact equality. They use vLLM's batch-invariant kernels, with which a batch does not
    change the rounding, or float32 on devices without such kernels, where it hardly does. The last two test
    distributions, in the data type in which the model is served. `listen` is called with the stage, the number of
    requests done and the number of all requests.
    """
    load_extensions()
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-check-"))
        draft = stack.enter_context(DraftProcess(options.draft, on_progress=lambda stage: listen(stage, None, None)))
        settings = options.settings(draft.address)
        stages = _Stages(options, listen, Path(logs))
        bare = stages.run(None, _exact_runs(options, None), is_exact=True)
        ours = stages.run(settings, _exact_runs(options, settings), is_exact=True)
        bare_served = stages.run(None, _served_runs(options, None))
        ours_served = stages.run(settings, _served_runs(options, settings))
    findings = [
        *_exact_findings(options, ours.engine.computes_in, bare.done, ours.done),
        *_served_findings(options, ours_served.engine.dtype, bare_served.done, ours_served.done),
    ]
    return Report(options, ours_served.engine, findings, stages.stage_s)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The outcome of one engine's run: the engine's properties, and the results of its jobs by name."""

    engine: Engine
    done: Mapping[str, DecodeResult]


class _Stages:
    """Starts engines one after the other, runs their jobs, and calls `listen` with the progress.

    `stage_s` has the seconds that each engine took.
    """

    def __init__(self, options: CheckOptions, listen: Listener, logs: Path) -> None:
        self._options = options
        self._listen = listen
        self._logs = logs
        self.stage_s: dict[str, float] = {}

    def run(self, settings: ProposerSettings | None, runs: Mapping[str, DecodeJob], is_exact: bool = False) -> _Stage:
        options = self._options
        name = f"{'bare' if settings is None else 'proposer'}, {'exact' if is_exact else 'as served'}"
        total, finished = sum(len(run.asks) for run in runs.values()), 0
        self._listen(f"{name}: starts", 0, total)

        def on_finished(num: int) -> None:
            nonlocal finished
            finished += num
            self._listen(name, finished, total)

        start_s = time.monotonic()
        target = LocalEngineOptions(
            options.target, settings, options.num_speculative_tokens, self._arguments(), is_exact
        )
        with TargetProcess(target, self._logs / f"{len(self.stage_s)}.log", options.target_cores) as process:
            done = {key: process.run(run, on_finished) for key, run in runs.items()}
        self.stage_s[name] = time.monotonic() - start_s
        return _Stage(process.engine, done)

    def _arguments(self) -> dict[str, Any]:
        return {
            "dtype": self._options.dtype,
            "max_model_len": 512,
            "enforce_eager": installed.runs_on_cpu(),  # with CUDA graphs where they exist, so that they are checked too
            "max_num_seqs": _MAX_ROWS,
            **self._options.arguments,
        }


def _greedy_asks(size: CheckSize, num_logprobs: int | None) -> list[PromptRequest]:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": size.num_tokens}
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    return [PromptRequest(text, sampling) for text in greedy_prompts(size.num_prompts)]


def _exact_runs(options: CheckOptions, settings: ProposerSettings | None) -> dict[str, DecodeJob]:
    size = options.size
    if settings is None:
        return {"greedy with logprobs": DecodeJob(_greedy_asks(size, 5))}
    asks = _greedy_asks(size, None)
    runs = {f"greedy: {name}": _run(asks, 0, replace(settings, planner=name)) for name in options.planners}
    return {**runs, "greedy with logprobs": _run(_greedy_asks(size, 5)[:_BATCH], 0, settings)}


def _served_runs(options: CheckOptions, settings: ProposerSettings | None) -> dict[str, DecodeJob]:
    size, is_bare = options.size, settings is None
    temperature = 1.0 if is_bare or options.wrong_temperature is None else options.wrong_temperature
    runs = {"greedy together": _run(_greedy_asks(size, 5), _BATCH, settings)}
    if is_bare:
        runs["greedy alone"] = DecodeJob(_greedy_asks(size, None), 1)
    for feature in FEATURES:
        asks = feature.asks(size.num_samples, temperature, 0 if is_bare else 1)
        runs[feature.name] = _sampled_run(asks, settings, feature)
    for turn in (1, 2):
        runs[f"seeds, time {turn}"] = _sampled_run(_seeded().asks(size.num_repeats), settings, _seeded())
    return runs


def _sampled_run(asks: list[PromptRequest], settings: ProposerSettings | None, feature: Feature) -> DecodeJob:
    run = _run(asks, _BATCH, settings, gamma=_SAMPLED_GAMMA)
    return msgspec.structs.replace(run, attempts=1) if feature.name in UNDRAFTED else run


def _run(
    asks: list[PromptRequest], batch: int, settings: ProposerSettings | None, **planner_settings: Any
) -> DecodeJob:
    """Return a job that decodes `asks`, at most `batch` at a time (0: all), in bare vLLM or with the proposer.

    `settings` are the proposer's; None for bare vLLM. `planner_settings` are the planner's; names of settings that it
    does not have are ignored. In a job with drafts the target waits for them, because short outputs would otherwise end
    before the first draft.
    """
    if settings is None:
        return DecodeJob(asks, batch)
    names = setting_names(settings.planner)
    # Without the cost model, drafts are submitted even where they do not pay.
    wanted = {"wait_for_draft": True, "cost_aware": False, **planner_settings}
    chosen = {name: value for name, value in wanted.items() if name in names}
    return DecodeJob(asks, batch, replace(settings, settings=chosen), _ATTEMPTS)


def _seeded() -> Feature:
    return replace(next(feature for feature in FEATURES if feature.is_seeded), num_tokens=16)


def _exact_findings(
    options: CheckOptions, computes_in: str, bare: Mapping[str, DecodeResult], ours: Mapping[str, DecodeResult]
) -> list[Finding]:
    asks, reference = _greedy_asks(options.size, None), bare["greedy with logprobs"]
    equal = [
        greedy_equality(f"greedy in {computes_in}: {name}", asks, reference, ours[f"greedy: {name}"])
        for name in options.planners
    ]
    logprobs = ours["greedy with logprobs"]
    same_prompts = DecodeResult(answers=reference.answers[: len(logprobs.answers)])
    return [*equal, logprob_agreement(same_prompts, logprobs)]


def _served_findings(
    options: CheckOptions, dtype: str, bare: Mapping[str, DecodeResult], ours: Mapping[str, DecodeResult]
) -> list[Finding]:
    rng = np.random.default_rng(options.seed)
    distributions = [(feature.name, bare[feature.name], ours[feature.name]) for feature in FEATURES]
    return [
        divergence_rates(dtype, bare["greedy alone"], bare["greedy together"], ours["greedy together"]),
        *same_distribution(distributions, options.alpha, rng),
        check_property(
            "JSON parses",
            "outputs that were not cut off",
            drop_truncated(ours["JSON schema"]),
            lambda one: is_json(one.text, TOSS_KEYS),
        ),
        check_property(
            "stop string absent", f"{STOP!r} in the text", ours["stop string"], lambda one: STOP not in one.text
        ),
        check_property("logprobs complete", "every sampled token", ours["logprobs"], has_all_logprobs),
        seeds_repeat(*((runs["seeds, time 1"], runs["seeds, time 2"]) for runs in (bare, ours))),
    ]
