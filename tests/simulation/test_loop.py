"""The round loop in virtual time: two lanes that really overlap."""

from __future__ import annotations

import math

import pytest

from specbranch.core.costs import PairModel, StepCost
from specbranch.core.distribution import Distribution
from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Planner, Settings
from specbranch.core.planners.predictors import ConstantPredictor
from specbranch.core.round import Round, Signal
from specbranch.core.session import Session, StopCondition
from specbranch.simulation.loop import DraftStep, Loop, Step, TargetStep
from specbranch.simulation.scripted import ScriptedEngine, ScriptedTarget, SimulatedDraft, TextScript
from tests.toys import planner_of, stream

ALWAYS_ONE = TextScript(3, lambda text: Distribution((1, 2), (0.9, 0.1), 0.3))
AGREES = TextScript(3, lambda text: Distribution((1,), (1.0,), 0.0))
DISAGREES = TextScript(3, lambda text: Distribution((0,), (1.0,), 0.0))


def play(
    name: str,
    target: TextScript,
    *,
    c: float,
    limit: int,
    sessions: int = 1,
    row_limit: int = 64,
    deadline_s: float = math.inf,
    draft: TextScript = ALWAYS_ONE,
    **settings: int,
) -> tuple[list[Session], list[Step], float]:
    costs, steps = PairModel(), list[Step]()
    group = [
        Session([0], planner_of(name, settings), GreedyPicker(), costs, StopCondition(max_new_tokens=limit))
        for _ in range(sessions)
    ]
    lane = SimulatedDraft(ScriptedEngine(draft, row_limit), StepCost(1.0))
    loop = Loop(group, ScriptedTarget(target, StepCost(c), stream(0)), lane, costs, deadline_s, steps.append)
    return group, steps, loop.run()


def test_sps_takes_turns() -> None:
    _, steps, elapsed_s = play("sps", AGREES, c=4, limit=6, gamma=2)

    assert elapsed_s == 2 * (2 + 4)
    targets = [step for step in steps if isinstance(step, TargetStep)]
    assert [(step.start_s, step.end_s, step.wait_s) for step in targets] == [(2, 6, 2), (8, 12, 2)]


def test_pearl_overlaps_and_the_target_never_waits() -> None:
    group, steps, elapsed_s = play("pearl", AGREES, c=4, limit=9, gamma=4)

    assert elapsed_s == 3 * 4
    assert group[0].stats.wait_s == 0
    assert [step.submitted for step in steps if isinstance(step, TargetStep)] == [(0,), (3,), (3,)]


def test_a_draft_step_under_way_when_the_verdict_arrives_runs_to_its_end() -> None:
    _, steps, _ = play("pearl", DISAGREES, c=1.5, limit=3, gamma=4)

    drafts = [(step.start_s, step.end_s) for step in steps if isinstance(step, DraftStep)]
    targets = [(step.start_s, step.end_s) for step in steps if isinstance(step, TargetStep)]
    assert targets == [(0, 1.5), (1.5, 3), (3, 4.5)]
    assert drafts == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_the_distribution_of_a_step_under_way_cannot_be_submitted_early() -> None:
    """The verdict at 1.5 finds one drafted token; the second is still being computed."""
    _, steps, _ = play("pearl", AGREES, c=1.5, limit=3, gamma=4)

    targets = [step for step in steps if isinstance(step, TargetStep)]
    assert targets[0].hits == (False,)
    assert targets[1].submitted == (0,)


def test_the_deadline_ends_a_wait_and_the_round_goes_without_a_draft() -> None:
    group, steps, elapsed_s = play("sps", AGREES, c=4, limit=2, gamma=3, deadline_s=1.5)

    assert group[0].output == [1, 1]
    assert elapsed_s == 2 * (1.5 + 4)
    assert [step.submitted for step in steps if isinstance(step, TargetStep)] == [(0,), (0,)]


def test_a_deadline_that_rounding_moves_does_not_stop_the_clock() -> None:
    group, _, elapsed_s = play("sps", AGREES, c=0.7, limit=40, gamma=3, deadline_s=0.1)

    assert group[0].output == [1] * 40
    assert elapsed_s == pytest.approx(40 * 0.8)


def test_a_planner_that_can_draft_nothing_more_does_not_hang_the_target() -> None:
    silent = TextScript(3, lambda text: Distribution((), (), 0.0))

    group, _, _ = play("sps", AGREES, c=2, limit=3, gamma=2, draft=silent)

    assert group[0].output == [1, 1, 1]


class Stuck(Planner[Settings]):
    """A planner that waits for ever and wants nothing."""

    def submit(self, round: Round) -> None:
        return None

    def rows_to_run(self, round: Round) -> tuple[()]:
        return ()


def test_a_planner_that_waits_for_nothing_is_passed_over() -> None:
    costs = PairModel()
    session = Session(
        [0], Stuck(Settings(), ConstantPredictor(Signal.SOME)), GreedyPicker(), costs, StopCondition(max_new_tokens=2)
    )
    lane = SimulatedDraft(ScriptedEngine(ALWAYS_ONE), StepCost(1.0))

    Loop([session], ScriptedTarget(AGREES, StepCost(2.0), stream(0)), lane, costs).run()

    assert session.output == [1, 1]


def test_sessions_share_steps_and_rows_are_shared_fairly() -> None:
    group, steps, _ = play("ssd", AGREES, c=6, limit=6, sessions=3, row_limit=4, gamma=2, num_guesses=4)

    assert all(session.output == [1] * 6 for session in group)
    assert max(len(step.nodes) for step in steps if isinstance(step, DraftStep)) == 4
    assert {len(step.submitted) for step in steps if isinstance(step, TargetStep)} == {3}


def test_a_finished_session_leaves_the_batch() -> None:
    costs = PairModel()
    group = [Session([0], planner_of("pearl"), GreedyPicker(), costs, StopCondition(max_new_tokens=n)) for n in (1, 4)]
    engine = ScriptedEngine(ALWAYS_ONE)
    steps: list[Step] = []
    target = ScriptedTarget(DISAGREES, StepCost(2.0), stream(0))

    Loop(group, target, SimulatedDraft(engine, StepCost(1.0)), costs, observe=steps.append).run()

    assert [len(step.submitted) for step in steps if isinstance(step, TargetStep)] == [2, 1, 1, 1]
    assert [session.output for session in group] == [[0], [0] * 4]


@pytest.mark.parametrize("c", [0.25, 1.0, 7.3])
def test_plain_decoding_takes_one_step_per_token(c: float) -> None:
    _, _, elapsed_s = play("none", AGREES, c=c, limit=5)

    assert elapsed_s == pytest.approx(5 * c)
