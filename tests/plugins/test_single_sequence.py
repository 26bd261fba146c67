"""Drafts for one text at a time, from a real service with a scripted draft."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbranch.core.planners import SettingError
from specbranch.engines.vocabulary import VocabFingerprint
from specbranch.plugins.single_sequence import SingleSequenceDrafts
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import DraftSettings
from specbranch.simulation.scripted import match
from tests.service.harness import PATIENCE_S, TARGET, VOCAB, Service, scripted_service

LONGEST = 4
DEADLINE_MS = 1000 * PATIENCE_S


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with scripted_service(tmp_path) as service:
        yield service


def drafts_of(service: Service, vocab_len: int = VOCAB, **settings: Any) -> SingleSequenceDrafts:
    chosen = {"planner": "sps", "deadline_ms": DEADLINE_MS, "is_gated": False, **settings}
    drafts = SingleSequenceDrafts(
        DraftSettings(address=service.address, **chosen), LONGEST, VocabFingerprint(vocab_len)
    )
    client_of(drafts).hello(PATIENCE_S)
    return drafts


def client_of(drafts: SingleSequenceDrafts) -> DraftClient:
    assert isinstance(drafts._client, DraftClient)
    return drafts._client


def step(drafts: SingleSequenceDrafts, text: list[int]) -> list[int]:
    """The text after one more step of the target, and the draft that it verified."""
    draft = drafts.after(np.array(text))
    verdict = match(draft, lambda index: TARGET.distribution((*text, *draft[:index])).ids[0])
    return text + verdict.committed(draft)


def plain(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(TARGET.distribution(tuple(text)).ids[0])
    return text


def decode(drafts: SingleSequenceDrafts, prompt: list[int], num_steps: int = 30) -> list[int]:
    drafts.announce_prompt(np.array(prompt))
    text = step(drafts, [*prompt, TARGET.distribution(tuple(prompt)).ids[0]])
    for _ in range(num_steps):
        text = step(drafts, text)
    return text


def test_texts_are_the_targets_and_drafts_are_accepted_in_each(service: Service) -> None:
    drafts, accepted = drafts_of(service), [0]
    for prompt in ([1, 2, 3], [7, 8], [1, 2, 3]):  # the last one as before
        text = decode(drafts, prompt)
        accepted.append(drafts.num_accepted)

        assert text == plain(prompt, len(text))
        assert accepted[-1] > accepted[-2] + 10
    assert client_of(drafts).counts.faults == client_of(drafts).counts.refused == 0


def test_a_text_that_grows_by_a_question_is_another_text(service: Service) -> None:
    """As in a chat: none of the new tokens counts as accepted."""
    drafts = drafts_of(service)
    text = decode(drafts, [1, 2, 3])
    accepted = drafts.num_accepted
    drafts.after(np.array([*text, *[5] * (LONGEST + 2)]))

    assert drafts.num_accepted == accepted


def test_no_more_is_drafted_than_there_is_room_for(service: Service) -> None:
    drafts = drafts_of(service)
    text = decode(drafts, [1, 2, 3])
    while len(drafts.after(np.array(text))) < 3:
        text = plain([1, 2, 3], len(text) + 1)
    lengths = []
    for room in (2, 1, 0, -1):
        text = plain([1, 2, 3], len(text) + 1)
        lengths.append(len(drafts.after(np.array(text), room)))

    assert lengths[0] <= 2 and lengths[1] <= 1 and lengths[2:] == [0, 0]
    assert sum(lengths) > 0


def test_a_service_that_dies_costs_one_deadline_and_comes_back_into_use(service: Service) -> None:
    drafts = drafts_of(service, deadline_ms=200.0)
    text = decode(drafts, [1, 2, 3])
    service.kill()
    num_timeouts = client_of(drafts).counts.timeouts
    for _ in range(50):
        text = step(drafts, text)
    num_timeouts, accepted = client_of(drafts).counts.timeouts - num_timeouts, drafts.num_accepted
    service.start()
    service.wait_until_up()
    end_s = time.monotonic() + PATIENCE_S
    while drafts.num_accepted < accepted + 5 and time.monotonic() < end_s:
        text = step(drafts, text)
        time.sleep(0.01)

    assert num_timeouts <= 1
    assert drafts.num_accepted >= accepted + 5
    assert text == plain([1, 2, 3], len(text))


def test_a_draft_with_another_vocabulary_is_told_of_once_and_not_used(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = drafts_of(service, vocab_len=2 * VOCAB)
    text = decode(drafts, [1, 2, 3])

    assert text == plain([1, 2, 3], len(text))
    assert drafts.num_accepted == 0
    assert caplog.text.count("is not used") == 1


def test_a_second_text_at_the_same_time_goes_without_drafts_and_does_not_wait(service: Service) -> None:
    drafts = drafts_of(service)
    text = decode(drafts, [1, 2, 3])
    with drafts._lock:  # another thread is in a call
        drafts.announce_prompt(np.array([5, 6]))
        assert drafts.after(np.array(text)) == []


def test_the_gate_first_measures_the_target_alone(service: Service) -> None:
    drafts = drafts_of(service, is_gated=True)
    text, calls = [1, 2, 3], []
    for _ in range(60):
        text = step(drafts, text)
        calls.append(client_of(drafts).counts.calls)

    assert calls[8] == 0 and calls[-1] > 0
    assert text == plain([1, 2, 3], len(text))


def parroted(drafts: SingleSequenceDrafts, num_steps: int, noise: bool = False) -> int:
    """Decode some steps of a target that repeats the same nine tokens, and return the number of tokens they gave."""
    answer = [10 + index % 9 for index in range(5 * num_steps + 1)]
    num = 1
    for _ in range(num_steps):
        draft = drafts.after(np.array([1, 2, 3, *answer[:num]]), has_recurring_noise=noise)
        num += match(draft, answer[num:].__getitem__).accepted + 1
    return num - 1


@pytest.mark.parametrize("address", [None, "ipc:///nowhere/draft.sock"])
def test_without_a_service_drafts_come_from_the_text(address: str | None) -> None:
    settings = DraftSettings(address=address, deadline_ms=20.0, settings={"cost_aware": False})
    drafts = SingleSequenceDrafts(settings, LONGEST, VocabFingerprint(VOCAB))
    drafts.announce_prompt(np.array([1, 2, 3]))

    assert parroted(drafts, 40) > 100
    assert drafts.num_accepted > 60
    assert (drafts._client is None) == (address is None)
    drafts.close()


def test_a_text_is_drafted_from_the_answer_before_it_unless_its_random_numbers_may_come_again() -> None:
    gained = []
    for noise in (False, True):
        drafts = SingleSequenceDrafts(
            DraftSettings(address=None, settings={"cost_aware": False}), LONGEST, VocabFingerprint(VOCAB)
        )
        parroted(drafts, 6, noise)
        gained.append(parroted(drafts, 6))

    assert gained[0] > gained[1] == 6


def test_a_planner_without_text_drafts_needs_a_service() -> None:
    with pytest.raises(SettingError, match="planner 'sps' with these settings makes none"):
        SingleSequenceDrafts(DraftSettings(address=None, planner="sps"), LONGEST, VocabFingerprint(VOCAB))
