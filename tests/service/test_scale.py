"""Eight targets with thirty-two sequences each on one service."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from tests.service.harness import PATIENCE_S, START_S, TARGET, proposed, scripted_service

TARGETS, SEQUENCES, STEPS = 8, 32, 12


class Replica(threading.Thread):
    """A target that decodes its whole batch with one message per step."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(daemon=True)
        options = ClientOptions(address, "specbranch", {"gamma": 4, "wait_for_draft": True}, deadline_s=PATIENCE_S)
        self.client = DraftClient(options)
        self.texts = [[number, sequence, 1] for sequence in range(SEQUENCES)]
        self.num_accepted = 0

    def run(self) -> None:
        self.client.hello(PATIENCE_S)
        num_new, sent = [1] * SEQUENCES, [0] * SEQUENCES
        for _ in range(STEPS):
            rows = [SequenceUpdate(text, new, old) for text, new, old in zip(self.texts, num_new, sent, strict=True)]
            for index, proposal in enumerate(proposed(self.client, *rows)):
                num_new[index], sent[index] = self._verify(self.texts[index], proposal), len(proposal)

    def _verify(self, text: list[int], proposal: list[int]) -> int:
        before = len(text)
        for token in proposal:
            text.append(TARGET.distribution(tuple(text)).ids[0])
            if text[-1] != token:
                return len(text) - before
            self.num_accepted += 1
        text.append(TARGET.distribution(tuple(text)).ids[0])
        return len(text) - before


def test_two_hundred_and_fifty_six_sessions_of_eight_targets_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_service(tmp_path, "--step-ms", "5") as service, contextlib.ExitStack() as stack:
        replicas = [Replica(service.address, number) for number in range(TARGETS)]
        for replica in replicas:
            stack.callback(replica.client.close)
            replica.start()
        for replica in replicas:
            replica.join(START_S)

    accepted = [replica.num_accepted for replica in replicas]
    waits_s = [replica.client.counts.wait_s / STEPS for replica in replicas]
    with capsys.disabled():
        print(f"\n256 sessions of 8 targets: mean call {1000 * max(waits_s):.0f} ms, {sum(accepted)} accepted")
    for replica in replicas:
        assert replica.client.counts.timeouts == 0
        assert replica.client.counts.opened == SEQUENCES
        assert replica.num_accepted > 0
