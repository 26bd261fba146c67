"""Bytes of others: the corpus, and inputs made of it by a fixed seed. `python -m tests.fuzz` searches further."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specbranch.errors import SpecBranchError
from tests.fuzz.corpus import CORPUS, read_cases
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS, feed

INPUTS = 1500
MAX_BYTES = 200_000


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_raises_an_error_that_is_not_ours(name: str, tmp_path: Path) -> None:
    seeds = [data for file, data in read_cases(name).items() if file.startswith("whole")]
    rng = random.Random(name)
    num_accepted = 0
    for data in (mutated(rng, seeds) for _ in range(INPUTS)):
        try:
            num_accepted += feed(TARGETS[name], data)
        except Exception as error:
            (tmp_path / "input").write_bytes(data)
            raise AssertionError(f"python -m tests.fuzz {name} {tmp_path / 'input'} raises {error!r}") from error

    assert num_accepted > INPUTS // 300  # else the corpus is of another version: python -m tests.fuzz.seeds


@pytest.mark.parametrize("name", TARGETS)
def test_whole_files_of_the_corpus_are_read_and_broken_ones_are_refused(name: str) -> None:
    found = {file: feed(TARGETS[name], data) for file, data in read_cases(name).items()}

    assert found == {file: file.startswith("whole") for file in found}
    assert True in found.values()


def test_an_error_that_is_not_ours_is_noticed() -> None:
    def ours(data: bytes) -> None:
        raise SpecBranchError("refused")

    def other(data: bytes) -> None:
        raise KeyError(data)

    assert not feed(ours, b"")
    with pytest.raises(KeyError):
        feed(other, b"")


def test_the_corpus_is_small() -> None:
    assert CORPUS.stat().st_size < MAX_BYTES
