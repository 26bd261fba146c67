"""Sequences that an engine has names for are hashed and sent from where they were last told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specbranch.service.client import sequences
from specbranch.service.client.sequences import SequenceDelta, SessionTable, SyncedSequences
from specbranch.service.wire.messages import MAX_NEW
from specbranch.service.wire.payloads import Digest

TokenArray = np.ndarray[Any, np.dtype[Any]]


def array(*tokens: int) -> TokenArray:
    return np.array(tokens, dtype="<i4")


def on_progress(
    told: SyncedSequences, name: str | None, tokens: TokenArray, num_new: int = 1
) -> tuple[bytes, list[int], bytes]:
    """What a client does with a row: the id before, the new tokens, the id after."""
    return told.advance(name, tokens, num_new)[:3]


@pytest.mark.parametrize("name", ["a", None])
def test_names_are_those_of_the_whole_sequence(name: str | None) -> None:
    told = SyncedSequences()
    text = list(range(20))
    on_progress(told, name, array(*text))
    for _ in range(5):
        text += [len(text), len(text) + 1]
        before, new, after = on_progress(told, name, array(*text), num_new=2)

        assert (before, new, after) == (Digest(text[:-2]).name, text[-2:], Digest(text).name)


def test_steps_that_were_not_told_are_made_up_for() -> None:
    told = SyncedSequences()
    on_progress(told, "a", array(1, 2, 3))
    before, new, after = on_progress(told, "a", array(1, 2, 3, 4, 5, 6, 7), num_new=1)

    assert (before, new) == (Digest([1, 2, 3]).name, [4, 5, 6, 7])
    assert after == Digest([1, 2, 3, 4, 5, 6, 7]).name
    assert on_progress(told, None, array(1, 2, 3, 4, 5, 6, 7, 8)) == (after, [8], Digest([1, 2, 3, 4, 5, 6, 7, 8]).name)


@pytest.mark.parametrize(
    "later",
    [array(1, 2, 3), array(1, 2), array(9, 9, 9, 9, 9), array(1, 2, 4, 5)],
    ids=["same", "shorter", "other", "changed"],
)
def test_a_name_that_stands_for_another_sequence_now_is_not_believed(later: TokenArray) -> None:
    told = SyncedSequences()
    on_progress(told, "a", array(1, 2, 3))
    before, new, after = on_progress(told, "a", later)

    assert (before, new, after) == (Digest(later[:-1]).name, later[-1:].tolist(), Digest(later).name)


def test_no_more_new_tokens_than_a_message_may_have() -> None:
    told = SyncedSequences()
    on_progress(told, "a", array(1, 2, 3))
    text = [1, 2, 3, *range(MAX_NEW + 1)]

    assert on_progress(told, "a", array(*text))[1] == text[-1:]
    assert on_progress(told, "a", array(*text, *range(MAX_NEW)))[1] == list(range(MAX_NEW))


def test_only_the_sequences_of_late_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MAX_SYNCED", 2)
    told = SyncedSequences()
    for name in ("a", "b", "a", "c"):
        on_progress(told, name, array(1, 2, 3))

    grown = array(1, 2, 3, 4, 5)
    assert [on_progress(told, name, grown)[1] for name in ("a", "c")] == [[4, 5], [4, 5]]
    assert on_progress(told, "b", grown)[1] == [5]


X, Y, Z = (Digest([number]).name for number in range(3))


def test_of_equal_sequences_the_first_keeps_the_session_and_both_were_proposed_the_same() -> None:
    sessions = SessionTable()
    (first,) = sessions.advance([SequenceDelta(X, [1], Y)])
    first.session.num_proposed, first.session.opened_s = 3, 7.0
    one, other = sessions.advance([SequenceDelta(Y, [2], Z), SequenceDelta(Y, [3], X)])

    assert (one.session, one.num_proposed) == (first.session, 3)
    assert (other.session.opened_s, other.num_proposed) == (None, 3)


def test_what_was_proposed_before_the_last_step_was_not_submitted_in_it() -> None:
    sessions = SessionTable()
    (first,) = sessions.advance([SequenceDelta(X, [1], Y)])
    first.session.num_proposed = 3
    sessions.advance([])

    assert sessions.advance([SequenceDelta(Y, [2], Z)])[0].num_proposed == 0
