"""The client against services that are wrong: nothing they send reaches the engine unchecked."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import pytest

from specbranch.service.client import ClientOptions, Committed, DraftClient
from tests.service.harness import PATIENCE_S, VOCAB, Walk, scripted_service
from tests.service.rogue import FOREIGN, rogue

TARGET_VOCAB = 40  # less than the draft's


def test_no_token_outside_the_targets_vocabulary_leaves_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft ends before the first such token; the rest of it would continue another text."""
    with rogue(tmp_path, "foreign") as service:
        options = ClientOptions(service.address, deadline_s=PATIENCE_S, vocab_len=FOREIGN)
        with contextlib.closing(DraftClient(options)) as client:
            assert client.hello(PATIENCE_S)
            drafts = [client.propose([Committed([1, 2, 3], 1), Committed([4, 5, 6], 1)]) for _ in range(3)]

    assert drafts == [[[5], [5]]] * 3
    assert client.counts.foreign == 6
    assert caplog.text.count("which the target does not have") == 1


def test_a_draft_with_a_larger_vocabulary_is_noticed_by_the_way_and_its_other_tokens_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real service. Nobody says hello: the client asks along with the first text, and waits for nothing."""
    with scripted_service(tmp_path) as service, caplog.at_level(logging.WARNING):
        options = ClientOptions(service.address, "pearl", {"gamma": 4}, deadline_s=0.2, vocab_len=TARGET_VOCAB)
        with contextlib.closing(DraftClient(options)) as client:
            walk = Walk(client, [1, 2])
            end_s = time.monotonic() + PATIENCE_S
            while client.counts.foreign < 3 or walk.num_accepted < 5:
                assert time.monotonic() < end_s, client.counts
                walk.step()
                assert all(token < TARGET_VOCAB for token in walk.proposal)
                time.sleep(0.01)

    assert client.counts.faults == client.counts.refused == 0
    assert caplog.text.count(f"a vocabulary of {VOCAB} tokens, the target one of {TARGET_VOCAB}") == 1
    walk.assert_text_is_the_targets()


def test_a_draft_with_the_targets_vocabulary_or_less_is_no_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_service(tmp_path) as service, caplog.at_level(logging.WARNING):
        for vocab_len in (VOCAB, VOCAB + 1, None):
            options = ClientOptions(service.address, vocab_len=vocab_len)
            with contextlib.closing(DraftClient(options)) as client:
                welcome = client.hello(PATIENCE_S)
                assert welcome is not None and welcome.vocab_len == VOCAB

    assert "vocabulary" not in caplog.text
