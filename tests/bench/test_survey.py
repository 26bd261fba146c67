"""A survey with a target and a draft that are scripted: costs by size, and the draft's distributions on answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbranch.bench.survey import MESSAGES, record_distributions, take_survey, time_steps
from specbranch.core.distribution import Distribution
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodedOutput, DecodeJob, DecodeResult, TargetProcess
from specbranch.simulation.scripted import ScriptedEngine, TextScript


class FakeTarget(TargetProcess):
    """Steps that take a tenth of a second and a hundredth more for each further request."""

    def __init__(self) -> None:
        super().__init__(LocalEngineOptions("none"), Path("none"))
        self.asked: list[tuple[int, int, bool]] = []

    def run(self, run: DecodeJob, on_finished: Any = None) -> DecodeResult:
        sampling = run.asks[0].sampling
        num_tokens = sampling["max_tokens"]
        self.asked.append((len(run.asks), num_tokens, sampling["ignore_eos"]))
        step_s = 0.1 + 0.01 * (len(run.asks) - 1)
        answer = [3, 4] * (num_tokens // 2)
        steps = [(step_s * (1 + position), 1) for position in range(num_tokens)]
        return DecodeResult(answers=[DecodedOutput(prompt=[1, 2], tokens=answer, steps=steps) for _ in run.asks])


def engine() -> ScriptedEngine:
    """Says the token after the last one, and 9 after a 4."""
    return ScriptedEngine(
        TextScript(10, lambda text: Distribution((9 if text[-1] == 4 else text[-1] + 1, 0), (0.8, 0.2), 0.5))
    )


def test_costs_are_measured_by_size_and_distributions_on_the_answers() -> None:
    target, stages = FakeTarget(), list[str]()
    survey = take_survey(target, engine(), MESSAGES[:5], (1, 2, 4), (1, 2), 12, stages.append)

    assert {size: round(step_s, 3) for size, step_s in survey.target_alone_s.items()} == {1: 0.1, 2: 0.11, 4: 0.13}
    assert round(survey.target_beside_s, 3) == 0.1
    assert set(survey.draft_s) == {1, 2}
    assert [asked for asked in target.asked if not asked[2]] == [(4, 12, False), (1, 12, False)]
    # 3 is right after 2, and 4 after 3; after a 4 the draft is wrong.
    assert survey.trace.num_tokens == 5 * 12
    assert survey.trace.match_share() == (1 + 6) / 12
    assert stages[0] == "target, 4 at once"
    assert survey.as_json()["target_alone_ms"]["2"] == survey.target_alone_s[2] * 1e3


def test_steps_are_timed_by_the_number_of_requests() -> None:
    times_s = time_steps(FakeTarget(), MESSAGES[:2], (1, 4), lambda stage: None)

    assert {size: round(step_s, 3) for size, step_s in times_s.items()} == {1: 0.1, 4: 0.13}


def test_answers_of_unequal_length_and_long_prompts_are_read_whole() -> None:
    draft = engine()
    pairs = [([5] * 700, [6, 7, 8]), ([1], [2]), ([2], [3, 4])]
    trace = record_distributions(draft, pairs * 4)

    assert [len(answer.distributions) for answer in trace.answers] == [3, 1, 2] * 4
    assert trace.match_share() == 1.0
    assert draft.num_handles == 0
