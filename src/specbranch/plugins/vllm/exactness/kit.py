"""The kit: which engines run what, one after the other, and the report that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from specbranch import __version__
from specbranch.core.planners import setting_names
from specbranch.plugins.vllm.exactness.engine import Worked, run_job
from specbranch.plugins.vllm.exactness.features import FEATURES, STOP, Feature
from specbranch.plugins.vllm.exactness.findings import (
    FAILED,
    Finding,
    always,
    divergence_rates,
    ended,
    greedy_equality,
    has_all_logprobs,
    is_json,
    logprob_agreement,
    same_distribution,
    seeds_repeat,
)
from specbranch.plugins.vllm.exactness.prompts import GREEDY, TOSS_KEYS
from specbranch.plugins.vllm.exactness.runs import Ask, Done, Job, News, Run
from specbranch.service.process import DraftOptions, DraftProcess

_BATCH = 8  # of the engine's own noise, of the runs that are compared with it, and of all that is sampled
_MOST_ROWS = 16
_SAMPLED_GAMMA = 2  # short outputs: longer drafts would only be cut


@dataclass(frozen=True, slots=True)
class Size:
    """How much is decoded. More samples notice smaller shifts."""

    num_prompts: int = 32
    num_tokens: int = 40
    num_samples: int = 400
    num_repeats: int = 16


FULL, QUICK = Size(), Size(8, 24, 64, 8)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """A pair, how it is served, and how much of it is checked.

    `wrong_temperature` makes the second sample wrong on purpose: the kit's own check.
    """

    target: str
    draft: DraftOptions
    planners: Sequence[str] = ("specbranch",)
    dtype: str = "auto"
    num_speculative_tokens: int = 4
    deadline_ms: float = 2000.0
    alpha: float = 1e-3
    seed: int = 0
    size: Size = FULL
    target_cores: Sequence[int] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wrong_temperature: float | None = None
    predictor: str = "confidence"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and what they hold for."""

    options: CheckOptions
    engine: Mapping[str, str]
    findings: Sequence[Finding]
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.result == FAILED for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """One document."""
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
            "versions": {"specbranch": __version__, **self.engine},
            "stage_s": {name: round(seconds, 1) for name, seconds in self.stage_s.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }


Listener = Callable[[str, int, int], None]  # stage, requests done, requests in all


def check(options: CheckOptions, listen: Listener) -> Report:
    """Start the draft service, then four engines one after the other, and judge what they decoded.

    Exact equality is asked in float32, where shapes of batches hardly round; distributions are compared as they are
    served.
    """
    with DraftProcess(options.draft) as draft:
        section = {
            "address": draft.address,
            "is_gated": False,
            "deadline_ms": options.deadline_ms,
            "planner": options.planners[0],
            "predictor": options.predictor,
        }
        run = _Stages(options, listen, section)
        bare = run.stage("bare, float32", "float32", _exact_runs(options, None))
        ours = run.stage("proposer, float32", "float32", _exact_runs(options, section))
        bare_served = run.stage(f"bare, {options.dtype}", options.dtype, _served_runs(options, None))
        ours_served = run.stage(f"proposer, {options.dtype}", options.dtype, _served_runs(options, section))
    findings = [
        *_exact_findings(options, bare.runs, ours.runs),
        *_served_findings(options, ours_served.engine["dtype"], bare_served.runs, ours_served.runs),
    ]
    return Report(options, ours_served.engine, findings, run.stage_s)


class _Stages:
    """Runs one engine after the other and tells how far it is."""

    def __init__(self, options: CheckOptions, listen: Listener, section: dict[str, Any]) -> None:
        self._options = options
        self._listen = listen
        self._section = section
        self.stage_s: dict[str, float] = {}

    def stage(self, name: str, dtype: str, runs: list[Run]) -> Worked:
        options = self._options
        arguments = {
            "dtype": dtype,
            "max_model_len": 512,
            "enforce_eager": True,
            "max_num_seqs": _MOST_ROWS,
            "distributed_executor_backend": "uni",
            **options.arguments,
        }
        section = self._section if name.startswith("proposer") else None
        cores = list(options.target_cores) if options.target_cores else None
        job = Job(options.target, arguments, runs, section, options.num_speculative_tokens, cores)
        total, done = sum(len(run.asks) for run in runs), 0
        self._listen(f"{name}: starts", 0, total)

        def hear(news: News) -> None:
            nonlocal done
            done += news.num_ended
            self._listen(name, done, total)

        start_s = time.monotonic()
        worked = run_job(job, hear)
        self.stage_s[name] = time.monotonic() - start_s
        return worked


def _greedy_asks(size: Size, num_logprobs: int | None) -> list[Ask]:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": size.num_tokens}
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    # Beyond the built-in texts they come again, each with one more space behind it.
    texts = [GREEDY[index % len(GREEDY)] + " " * (index // len(GREEDY)) for index in range(size.num_prompts)]
    return [Ask(text, sampling) for text in texts]


def _exact_runs(options: CheckOptions, section: dict[str, Any] | None) -> list[Run]:
    size = options.size
    if section is None:
        return [Run("greedy with logprobs", _greedy_asks(size, 5), 0)]
    with_logprobs = Run("greedy with logprobs", _greedy_asks(size, 5)[:_BATCH], 0, _waiting(section))
    asks = _greedy_asks(size, None)
    runs = [Run(f"greedy: {name}", asks, 0, _waiting({**section, "planner": name})) for name in options.planners]
    return [*runs, with_logprobs]


def _served_runs(options: CheckOptions, section: dict[str, Any] | None) -> list[Run]:
    size, is_bare = options.size, section is None
    sampled = None if section is None else _waiting(section, gamma=_SAMPLED_GAMMA)
    temperature = 1.0 if is_bare or options.wrong_temperature is None else options.wrong_temperature
    together = Run("greedy together", _greedy_asks(size, 5), _BATCH, None if section is None else _waiting(section))
    alone = [Run("greedy alone", _greedy_asks(size, None), 1)] if is_bare else []
    distributions = [
        Run(feature.name, feature.asks(size.num_samples, temperature, 0 if is_bare else 1), _BATCH, sampled)
        for feature in FEATURES
    ]
    again = [Run(f"seeds, time {turn}", _seeded().asks(size.num_repeats), _BATCH, sampled) for turn in (1, 2)]
    return [together, *alone, *distributions, *again]


def _waiting(section: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Drafts that are waited for: short outputs would else be over before the first draft comes."""
    names = setting_names(section["planner"])
    wanted = {"waits": True, **settings}
    return {**section, "settings": {name: value for name, value in wanted.items() if name in names}}


def _seeded() -> Feature:
    return replace(next(feature for feature in FEATURES if feature.is_seeded), num_tokens=16)


def _exact_findings(options: CheckOptions, bare: Mapping[str, Done], ours: Mapping[str, Done]) -> list[Finding]:
    asks, reference = _greedy_asks(options.size, None), bare["greedy with logprobs"]
    equal = [
        greedy_equality(f"greedy in float32: {name}", asks, reference, ours[f"greedy: {name}"])
        for name in options.planners
    ]
    logprobs = ours["greedy with logprobs"]
    same_prompts = Done(reference.name, reference.answers[: len(logprobs.answers)])
    return [*equal, logprob_agreement(same_prompts, logprobs)]


def _served_findings(
    options: CheckOptions, dtype: str, bare: Mapping[str, Done], ours: Mapping[str, Done]
) -> list[Finding]:
    rng = np.random.default_rng(options.seed)
    distributions = [(feature.name, bare[feature.name], ours[feature.name]) for feature in FEATURES]
    return [
        divergence_rates(dtype, bare["greedy alone"], bare["greedy together"], ours["greedy together"]),
        *same_distribution(distributions, options.alpha, rng),
        always("JSON parses", "outputs that were not cut off", ended(ours["JSON schema"]), is_json(TOSS_KEYS)),
        always("stop string absent", f"{STOP!r} in the text", ours["stop string"], lambda one: STOP not in one.text),
        always("logprobs complete", "every sampled token", ours["logprobs"], has_all_logprobs),
        seeds_repeat(*((runs["seeds, time 1"], runs["seeds, time 2"]) for runs in (bare, ours))),
    ]
