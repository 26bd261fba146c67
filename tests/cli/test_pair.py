"""Comparing an answer with one without drafts: on equal hardware, and in one line."""

from __future__ import annotations

import pytest

from specbranch.cli import pair
from specbranch.cli.pair import LocalPairOptions, comparison_line, shared_cores
from specbranch.cli.terminal import StreamedAnswer, TextRun
from specbranch.launch import vllm_worker
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.launch.vllm_engine import StepOutput
from specbranch.plugins.vllm import installed


def answered(tokens: list[int], seconds: float) -> StreamedAnswer:
    """An answer whose tokens after the first took `seconds`."""
    answer = StreamedAnswer(asked_s=0.0)
    for at_s, some in ((1.0, tokens[:1]), (1.0 + seconds, tokens[1:])):
        answer.take(StepOutput(index=0, tokens=some, text="x", finish_reason=None, at_s=at_s), [TextRun("x", False)])
    return answer


def pair_on(target: tuple[int, ...] | None, draft: tuple[int, ...] | None) -> LocalPairOptions:
    return LocalPairOptions(target="t", draft=DraftServiceOptions("d", cores=draft), target_cores=target)


@pytest.mark.parametrize(
    ("target", "draft", "shared"),
    [
        ((0,), (1,), (0, 1)),
        ((2, 3), (1,), (1, 2, 3)),
        (None, (1,), None),
        ((0,), None, None),
    ],
)
def test_the_answer_without_drafts_gets_the_cores_of_both(
    target: tuple[int, ...] | None,
    draft: tuple[int, ...] | None,
    shared: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)

    assert shared_cores(pair_on(target, draft)) == shared


def test_a_draft_beside_a_gpu_takes_nothing_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: False)

    assert shared_cores(pair_on((0,), (1,))) is None


def test_the_line_names_the_cores_of_the_answer_without_drafts() -> None:
    line = comparison_line(answered([1, 2, 3], 1.0), answered([1, 2, 3], 2.0), (0, 1), is_greedy=True)

    assert line == ("without drafts on the same cores 0,1 1.0 tokens/s, with drafts 2.0: 2.00x; both answers are equal")


def test_the_line_says_where_answers_part_and_that_sampled_ones_are_not_compared() -> None:
    one, other = answered([1, 2, 3], 1.0), answered([1, 2, 4], 1.0)

    assert "the answers differ after 2 equal tokens" in comparison_line(one, other, None, is_greedy=True)
    assert comparison_line(one, other, None, is_greedy=False).endswith("sampled answers are not compared")
    assert "cores" not in comparison_line(one, other, None, is_greedy=True)


def test_what_a_process_reports_becomes_an_answer_step_by_step() -> None:
    said = vllm_worker.DecodedOutput(
        tokens=[1, 2, 3], text="abc", texts=["a", "bc"], steps=[(0.5, 1), (1.5, 2)], finish_reason="stop"
    )

    answer = pair._as_answer(said)

    assert (answer.tokens, answer.text, answer.finish_reason) == ([1, 2, 3], "abc", "stop")
    assert (answer.first_token_s, answer.decode_s) == (0.5, 1.0)
    assert answer.as_json()["pieces"][1] == {"at_s": 1.5, "runs": [["bc", False]]}
