"""`specbranch serve` without engines; with them it is tested in tests/vllm."""

from __future__ import annotations

import signal

import pytest

from specbranch.cli.commands.serve import _uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_vllm_is_being_started_is_heard_when_it_is(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    is_started = False
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        signal.raise_signal(number)
        is_started = True

    assert is_started
    assert signal.getsignal(number) is before


def test_without_a_signal_nothing_happens() -> None:
    with _uninterrupted():
        pass
