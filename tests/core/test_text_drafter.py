"""Text drafts in the target's own process: what is drafted, what is learned, what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.planners import SettingError
from specbranch.core.planners.budget import BudgetSettings
from specbranch.core.text_drafter import TextDrafter, make_text_drafter

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def drafter_of(max_sequences: int = 16, **settings: object) -> TextDrafter:
    def fail() -> None:
        raise

    return TextDrafter(BudgetSettings(**{"cost_aware": False, **settings}), fail, max_sequences)  # type: ignore[arg-type]


def decode(drafter: TextDrafter, name: str, prompt: list[int], answer: list[int], max_len: int = 4) -> int:
    """Give an answer with the drafts verified, and return the number of the target's steps."""
    text, steps = [*prompt, answer[0]], 1
    while (left := answer[len(text) - len(prompt) :]) and (steps := steps + 1):
        draft = drafter.draft(name, text, 1, max_len)
        accepted = next((at for at, (one, other) in enumerate(zip(draft, left, strict=False)) if one != other), None)
        text += left[: (min(len(draft), len(left)) if accepted is None else accepted) + 1]
    drafter.draft(name, text, 1, max_len)
    return steps


def test_what_is_copied_from_the_prompt_is_drafted() -> None:
    drafter = drafter_of()

    assert drafter.draft("a", [*PROMPT, 1, 2, 3], 1, 4) == [4, 5, 6, 7]
    assert drafter.draft("a", [*PROMPT, 1, 2, 3, 4, 5, 6, 7], 4, 2) == [8, 9]
    assert drafter.draft("b", np.array([*PROMPT, 3, 4, 5], dtype=np.int32), 1, 2) == [6, 7]
    assert drafter.draft("c", [11, 12], 1, 4) == []
    assert drafter.counts.as_dict() == {"text_drafts": 3, "text_tokens": 8, "text_accepted": 3, "text_faults": 0}


def test_what_another_answer_said_is_drafted_also_after_it_has_ended() -> None:
    drafter = drafter_of()
    first = decode(drafter, "a", [20, 21], PROMPT)
    drafter.forget(["a", "unknown"])

    assert decode(drafter, "b", [30], PROMPT) < first == len(PROMPT)


def test_an_answer_whose_random_numbers_may_come_again_helps_no_other() -> None:
    for has_recurring_noise, draft in ((True, []), (False, [4, 5])):
        drafter = drafter_of()
        for length in (1, 9):
            drafter.draft("a", [20, *PROMPT[:length]], length, 4, has_recurring_noise)
        assert drafter.draft("b", [30, 1, 2, 3], 3, 2) == draft


def test_a_sequence_may_be_left_out_of_steps() -> None:
    drafter = drafter_of()
    drafter.draft("a", [*PROMPT, 1], 1, 4)

    assert drafter.draft("a", [*PROMPT, 1, 50, 51, 52, 53, 50, 51], 1, 2) == [52, 53]


@pytest.mark.parametrize("other", [[*PROMPT, 1, 2], [90, *PROMPT, 7, 1, 2, 3, 8, 9, 1, 2]])
def test_a_name_that_is_used_again_begins_anew(other: list[int]) -> None:
    """The first text is shorter than the one known by the name, the second has another end where that ended."""
    drafter = drafter_of()
    drafter.draft("a", [*PROMPT, 1, 2, 3], 1, 4)

    assert drafter.draft("a", other, 1, 4) == drafter_of().draft("a", other, 1, 4) != []


def test_the_same_text_again_gets_the_same_draft() -> None:
    drafter = drafter_of()
    drafts = [drafter.draft("a", [*PROMPT, 1, 2, 3], 1, max_len) for max_len in (3, 3, 1)]

    assert drafts == [[4, 5, 6], [4, 5, 6], [4]]


def test_the_least_recently_used_sequence_is_forgotten() -> None:
    drafter = drafter_of(max_sequences=2)
    for name in ("a", "b", "a", "c"):
        drafter.draft(name, [*PROMPT, 1], 1, 1)

    assert list(drafter._sessions) == ["a", "c"]


def test_grounds_that_prove_wrong_are_drafted_from_no_more() -> None:
    drafter = drafter_of()
    text, lens = [*range(100), 7, 8], []
    for index in range(150):  # two known tokens, and then never what followed them
        draft = drafter.draft("a", text, 1, 4)
        lens.append(len(draft))
        text += [200 + index, 10 + index, 11 + index]

    assert lens[0] == 4 and not any(lens[-10:])
    assert drafter.counts.text_accepted == 0


def test_tokens_that_do_not_pay_for_their_time_are_not_drafted() -> None:
    """A step with drafts takes much longer here, so the price of a token is soon above its worth."""
    drafter = drafter_of(cost_aware=True)
    text, lens = [*PROMPT, 1, 2, 3], []
    for index in range(60):
        draft = drafter.draft("a", text, 1, 4)
        lens.append(len(draft))
        drafter.observe_step(1, len(draft), 1, 0.01 + 0.1 * len(draft))
        text.append(PROMPT[(index + 3) % 9] if index % 9 < 8 else 100 + index)

    assert any(lens) and not any(lens[-10:])


def test_a_planner_that_waits_for_its_draft_does_not_wait_here() -> None:
    assert drafter_of(wait_for_draft=True).draft("a", [*PROMPT, 1, 2, 3], 1, 2) == [4, 5]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.data())
def test_drafts_are_at_most_as_long_as_asked_and_whatever_comes_is_taken(text: list[int], data: st.DataObject) -> None:
    drafter, length = drafter_of(), 1
    while length < len(text):
        num_new = data.draw(st.integers(1, 5))
        length += num_new
        max_len = data.draw(st.integers(0, 5))
        draft = drafter.draft(data.draw(st.sampled_from("ab")), text[:length], num_new, max_len)
        assert len(draft) <= max_len and set(draft) <= set(text)
    assert drafter.counts.text_accepted <= drafter.counts.text_tokens


def test_a_fault_is_counted_and_costs_one_sequence_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    drafter = TextDrafter(BudgetSettings(), lambda: calls.append(1))

    class Bad(Sequence[int]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            raise RuntimeError("of our own")

    for _ in range(2):
        assert drafter.draft("a", Bad(), 1, 4) == []
    monkeypatch.setattr(drafter._costs, "target", None)
    drafter.observe_step(1, 0, 1, 0.1)

    assert calls == [1] and drafter.counts.text_faults == 3
    assert not drafter._sessions


@pytest.mark.parametrize(
    ("planner", "settings", "drafts"),
    [
        ("budget", {}, True),
        ("budget", {"uses_text": False}, True),
        ("budget", {"uses_text": False, "uses_memory": False}, False),
        ("specbranch", {}, False),
        ("none", {}, False),
    ],
)
def test_only_budget_drafts_from_the_text(planner: str, settings: dict[str, bool], drafts: bool) -> None:
    assert (make_text_drafter(planner, settings, print) is not None) == drafts


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(SettingError, match="did you mean 'gamma'"):
        make_text_drafter("budget", {"gama": 3}, print)
