"""What a service learns of a target: what its steps cost by the tokens in them, and how fast it emits tokens."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from specbranch.core.costs import StepTimeModel
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.server.tenants import Tenants
from specbranch.service.wire.messages import MAX_STEP_US, StepRequest, StepRow, decode_request
from tests.service.harness import IdleTransport
from tests.world.schedule import Clock

NAME = bytes(16)
WAITED_S = 0.125


def step(num_rows: int, num_submitted: int, num_new: int, step_us: int) -> StepRequest:
    rows = [StepRow(NAME, list(range(num_new)), NAME, num_submitted) for _ in range(num_rows)]
    return StepRequest(1, b"ours", 10.0, rows, step_us)


def test_a_target_that_tells_its_step_times_teaches_what_verifying_costs() -> None:
    tenants = Tenants(StepTimeModel())
    for _ in range(20):
        for num_submitted in (0, 4, 8):
            tokens = 2 * (1 + num_submitted)
            tenants.record_step(step(2, num_submitted, 1, 100_000 + 10_000 * (tokens - 1)), 0.0)
    costs = tenants.costs(b"ours")

    assert costs.target.cost is not None
    assert costs.target.cost.at(1) == pytest.approx(0.1)
    assert costs.target.cost.per_row_s == pytest.approx(0.01)
    # Two tokens a step of 0.11 s without drafts, 18 a second: so much must a token of 0.01 s bring.
    assert costs.target.min_accept_prob == pytest.approx(0.18, abs=0.01)


def test_where_verifying_is_free_every_token_is_worth_it() -> None:
    tenants = Tenants(StepTimeModel())
    for num_submitted in (0, 4, 8, 0, 4, 8):
        tenants.record_step(step(1, num_submitted, 3, 100_000), 0.0)

    assert tenants.costs(b"ours").target.min_accept_prob == pytest.approx(0.0, abs=1e-9)
    assert tenants.costs(b"others").target.min_accept_prob == 0.5, (
        "of a target that nobody has seen verify, much is feared"
    )


def test_pauses_between_steps_count_only_while_the_target_tells_nothing() -> None:
    tenants = Tenants(StepTimeModel())
    for now_s in (1.0, 2.0, 3.0):
        tenants.record_step(step(1, 0, 1, 0), now_s)
        tenants.record_reply(b"ours", now_s + 0.5)
    cost = tenants.costs(b"ours").target.cost
    assert cost is not None and cost.at(1) == pytest.approx(0.5)
    tenants.record_step(step(1, 0, 1, 200_000), 10.0)
    before = tenants.costs(b"ours").target.cost
    tenants.record_reply(b"ours", 11.0)
    tenants.record_step(step(1, 0, 1, 0), 15.0)

    assert tenants.costs(b"ours").target.cost == before


def test_a_machine_that_stood_still_once_teaches_little_and_a_target_that_has_become_slow_does() -> None:
    tenants = Tenants(StepTimeModel())
    for num_submitted in (0, 4, 8, 0, 4, 8):
        tenants.record_step(step(1, num_submitted, 3, 100_000), 0.0)
    tenants.record_step(step(1, 8, 3, 30_000_000), 0.0)
    assert tenants.costs(b"ours").target.min_accept_prob < 0.4
    for _ in range(2):
        tenants.record_step(step(1, 0, 1, 30_000_000), 0.0)
        tenants.record_step(step(1, 0, 1, 30_000_000), 0.0)
    cost = tenants.costs(b"ours").target.cost

    assert cost is not None and cost.at(1) > 1.0


def test_a_step_too_long_to_be_told_is_not_told() -> None:
    clock = Clock()
    sent: list[StepRequest] = []

    class Nobody(IdleTransport):
        def send(self, frame: bytes) -> bool:
            request = decode_request(frame)
            if isinstance(request, StepRequest):
                sent.append(request)
            return True

        def await_readable(self, timeout_s: float) -> bool:
            clock.leap(WAITED_S)
            return False

    client = DraftClient(ClientOptions("nobody"), transport=Nobody(), clock=clock)
    for step_s in (None, 1.0 + WAITED_S, 1e-6 * MAX_STEP_US + 1.0):
        client.propose([SequenceUpdate([1, 2, 3], 1)], step_s)

    assert [one.step_us for one in sent] == [0, 1_000_000, 0], "what the target has waited for drafts does not count"


def test_the_client_tells_the_time_of_whole_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[StepRequest] = []
    clock = Clock()
    with contextlib.closing(DraftClient(ClientOptions(f"ipc://{tmp_path}/nobody.sock"), clock=clock)) as client:
        monkeypatch.setattr(client.connection, "send", sent.append)
        for step_s in (None, 0.25, None):
            client.propose([SequenceUpdate([1, 2, 3], 1)], step_s)
    times = [one.step_us for one in sent if isinstance(one, StepRequest)]

    assert times == [0, 250_000, 0]
