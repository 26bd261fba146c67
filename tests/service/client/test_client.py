"""The client against services that are wrong: nothing reaches the engine unchecked, and nothing holds it up."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbranch.core.round import MAX_WINDOW
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import NO_ANSWER, ClientOptions, SequenceUpdate
from specbranch.service.wire.messages import (
    MAX_REPLY,
    MAX_ROWS,
    VERSION,
    DraftReply,
    Hello,
    StepRequest,
    Welcome,
    decode_request,
    encode,
)
from tests.service.harness import (
    PATIENCE_S,
    START_S,
    VOCAB,
    IdleTransport,
    Walk,
    WatchedClient,
    proposed,
    scripted_service,
)
from tests.service.rogue import FOREIGN, rogue
from tests.world.schedule import Clock

DEADLINE_S = 0.1
TARGET_VOCAB = 40  # less than the draft's


@contextlib.contextmanager
def client_of_rogue(directory: Path, deed: str, **options: Any) -> Iterator[WatchedClient]:
    """A client that has found a rogue at its address."""
    with rogue(directory, deed) as service:
        client = WatchedClient(ClientOptions(service.address, **{"deadline_s": DEADLINE_S, **options}))
        with contextlib.closing(client):
            assert client.hello(PATIENCE_S)
            yield client


def test_no_token_outside_the_targets_vocabulary_leaves_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft ends before the first such token; the rest of it would continue another text."""
    with client_of_rogue(tmp_path, "foreign", deadline_s=PATIENCE_S, vocab_len=FOREIGN) as client:
        drafts = [proposed(client, SequenceUpdate([1, 2, 3], 1), SequenceUpdate([4, 5, 6], 1)) for _ in range(3)]

    assert drafts == [[[5], [5]]] * 3
    assert client.counts.unknown_token == 6
    assert caplog.text.count("which the target does not have") == 1


def test_two_samples_of_one_text_that_part_are_two_texts_at_once(tmp_path: Path) -> None:
    """One goes on with the session; the other was never sent, so it is not taken for one that was sent just now."""
    opened = []
    with (
        scripted_service(tmp_path) as service,
        contextlib.closing(DraftClient(ClientOptions(service.address, deadline_s=PATIENCE_S))) as client,
    ):
        assert client.hello(PATIENCE_S)
        for texts in ([[1, 2, 3]] * 2, [[1, 2, 3, 4], [1, 2, 3, 5]], [[1, 2, 3, 4, 6], [1, 2, 3, 5, 6]]):
            client.propose([SequenceUpdate(text, 1) for text in texts])
            opened.append(client.counts.opened)

    assert opened == [1, 2, 2]


def test_an_empty_draft_is_told_from_no_answer(tmp_path: Path) -> None:
    """The second text has a token that the draft model does not know, so the service never drafts for it."""
    with (
        scripted_service(tmp_path) as service,
        contextlib.closing(DraftClient(ClientOptions(service.address, "none", deadline_s=PATIENCE_S))) as client,
    ):
        assert client.hello(PATIENCE_S)
        texts, end_s = [[1, 2, 3], [1, VOCAB + 7]], time.monotonic() + PATIENCE_S
        found = client.propose([SequenceUpdate(text, 1) for text in texts])
        assert all(draft is NO_ANSWER for draft in found), "both are unknown yet"
        while found[0] is NO_ANSWER:
            assert time.monotonic() < end_s, client.counts
            time.sleep(0.02)
            texts = [[*text, 4] for text in texts]
            found = client.propose([SequenceUpdate(text, 1) for text in texts])

    assert found[0] == NO_ANSWER and found[1] is NO_ANSWER
    assert client.counts.faults == client.counts.refused == 0


def test_a_draft_with_a_larger_vocabulary_is_noticed_by_the_way_and_its_other_tokens_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real service. Nobody says hello: the client asks along with the first text, and waits for nothing."""
    sample = bytes(range(8))  # the tokens are known to be the same; the rest is padding
    with scripted_service(tmp_path, "--vocab-sample", sample.hex()) as service, caplog.at_level(logging.WARNING):
        options = ClientOptions(
            service.address, "pearl", {"gamma": 4}, deadline_s=0.2, vocab_len=TARGET_VOCAB, vocab_fingerprint=sample
        )
        with contextlib.closing(DraftClient(options)) as client:
            walk = Walk(client, [1, 2])
            end_s = time.monotonic() + PATIENCE_S
            while client.counts.unknown_token < 3 or walk.num_accepted < 5:
                assert time.monotonic() < end_s, client.counts
                walk.step()
                assert all(token < TARGET_VOCAB for token in walk.proposal)
                time.sleep(0.01)

    assert client.counts.faults == client.counts.refused == 0
    assert caplog.text.count(f"a vocabulary of {VOCAB} tokens, the target one of {TARGET_VOCAB}") == 1
    walk.assert_text_is_the_targets()


def test_a_draft_with_the_targets_vocabulary_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scripted_service(tmp_path) as service, caplog.at_level(logging.WARNING):
        for vocab_len in (VOCAB, None):
            options = ClientOptions(service.address, vocab_len=vocab_len)
            with contextlib.closing(DraftClient(options)) as client:
                welcome = client.hello(PATIENCE_S)
                assert welcome is not None and welcome.vocab_len == VOCAB

    assert "vocabulary" not in caplog.text


def test_rows_beyond_the_bounds_of_a_message_are_counted_and_the_first_one_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specbranch.service.client.interface.MAX_SEQUENCE", 4)
    with contextlib.closing(DraftClient(ClientOptions(f"ipc://{tmp_path}/draft.sock"))) as client:
        for tokens in ([1] * 4, [1] * 5, [1] * 6, [1]):
            client.propose([SequenceUpdate(tokens, 1)])

    assert client.counts.oversized == 2
    assert client.counts.faults == 0
    assert caplog.text.count("a text of 5 tokens, 1 of them new, is not drafted for") == 1
    assert "a text of 6" not in caplog.text


@pytest.mark.parametrize("deed", ["garbage", "late"])
def test_a_service_that_sends_without_end_holds_nobody_up(tmp_path: Path, deed: str) -> None:
    """For every step it sends a second of frames, as fast as they are taken; no call goes on past its deadline."""
    with client_of_rogue(tmp_path, deed) as client:
        end_s, num_calls = time.monotonic() + PATIENCE_S, 0
        while num_calls < 20 or client.counts.late + client.counts.refused <= 20:
            assert time.monotonic() < end_s, client.counts
            client.propose([SequenceUpdate([1, 2, 3], 1)])
            num_calls += 1
            time.sleep(0.02)

    assert client.watched.overstays == []
    assert client.counts.faults == 0


def test_a_reply_beyond_the_bound_is_not_taken_and_the_service_is_found_again(tmp_path: Path) -> None:
    with client_of_rogue(tmp_path, "huge") as client:
        end_s = time.monotonic() + PATIENCE_S
        while proposed(client, SequenceUpdate([1, 2, 3], 1)) != [[5]]:
            assert time.monotonic() < end_s, client.counts
            time.sleep(0.02)

    assert client.counts.refused == client.counts.faults == 0


def test_the_largest_answer_there_can_be_fits_into_a_reply() -> None:
    assert 3 * len(encode(DraftReply(1 << 61, [[(1 << 31) - 1] * MAX_WINDOW] * MAX_ROWS))) < MAX_REPLY


FORKED = """
import os, signal, sys
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import NO_ANSWER, ClientOptions, SequenceUpdate
from specbranch.service.client.stats import ServiceStatus, StatsClient
address = sys.argv[1]
row = SequenceUpdate([1, 2, 3], 1)
long_s = 3600.0  # who waits for anything never ends
client, stats_client = DraftClient(ClientOptions(address, "pearl", deadline_s=60.0)), StatsClient(address, b"ours")
assert client.hello(long_s) and stats_client.poll(long_s) is ServiceStatus.ANSWERS
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that waits
    assert [draft.tokens for draft in client.propose([row, row])] == [[], []]
    assert client.announce_prompts([[1, 2]]) is None
    assert client.hello(long_s) is None
    assert stats_client.poll(long_s) is ServiceStatus.ABSENT
    client.close()
    stats_client.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
client.propose([row])
assert client.counts.answered == 1 and stats_client.poll(long_s) is ServiceStatus.ANSWERS
"""


def test_a_forked_process_gets_nothing_at_once_and_leaves_its_parent_in_peace(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, service.address], check=False, timeout=START_S, capture_output=True
        )

    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode().count("a forked process cannot use") == 2  # the client's and the stats_client's


class ForgetfulLink(IdleTransport):
    """A way to a service that knows no text, however often it was sent. To send one takes a while."""

    def __init__(self, clock: Clock, open_s: float) -> None:
        self._clock, self._open_s = clock, open_s
        self._replies: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        request = decode_request(frame)
        if isinstance(request, Hello):
            self._replies.append(encode(Welcome(VERSION, request.round, "forgetful", VOCAB)))
        elif isinstance(request, StepRequest):
            self._replies.append(encode(DraftReply(request.round, [None] * len(request.rows))))
        else:
            self._clock.leap(self._open_s)
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        return [[self._replies.pop(0)] for _ in range(min(len(self._replies), max_messages))]

    def await_readable(self, timeout_s: float) -> bool:
        raise AssertionError("the answer is here already")


def forgotten_client(clock: Clock, open_s: float) -> DraftClient:
    options = ClientOptions("ipc:///nowhere/draft.sock", deadline_s=DEADLINE_S)
    return DraftClient(options, transport=ForgetfulLink(clock, open_s), clock=clock)


def test_prompts_that_take_longer_to_send_than_there_is_time_are_left_for_later() -> None:
    """Each takes two fifths of the deadline: the third one is over it, and no fourth is begun."""
    client = forgotten_client(Clock(), open_s=0.4 * DEADLINE_S)
    client.announce_prompts([np.zeros(8, dtype=np.int32)] * 64)

    assert client.counts.opened == 3
    assert client.counts.faults == 0


def long_rows(num_steps: int) -> Iterator[list[SequenceUpdate]]:
    """Steps of 64 texts that grow by a token each, as vLLM hands them over."""
    table = np.random.default_rng(0).integers(0, 40, (64, 32 + num_steps), dtype=np.int32)
    for step in range(1, num_steps + 1):
        yield [SequenceUpdate(row[: 32 + step], 1) for row in table]


def test_many_texts_are_sent_a_part_at_a_time_and_not_again_at_every_step() -> None:
    """A tenth of the deadline each, and the service knows none of them at any step: ten in a step, and each once."""
    clock = Clock()
    client = forgotten_client(clock, open_s=0.1 * DEADLINE_S)
    opened = []
    for number, rows in enumerate(long_rows(20)):
        clock.leap(1.0 if number == 19 else 0.0)  # after a second they are sent again
        client.propose(rows)
        opened.append(client.counts.opened)

    assert opened == [10, 20, 30, 40, 50, 60, *[64] * 13, 74]
    assert client.counts.faults == 0
