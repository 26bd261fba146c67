"""What the tests of engines that decode one text at a time have in common."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specbranch import DraftServer
from specbranch.draft_server import DraftKeywords
from tests.engines.models import model_path

SUBJECTS = ("water", "the moon", "a fox", "bread")
BEGINNINGS = ("Here is a story about", "The most important fact about", "def count_words(text):  #", "A poem about")
PROMPTS = [f"{start} {subject}" for subject in SUBJECTS for start in BEGINNINGS]
NUM_TOKENS = 24
# It waits for every draft, so that what is accepted does not depend on how busy the machine is.
PATIENT: DraftKeywords = {"planner": "sps", "max_draft_tokens": 4, "deadline_ms": 60_000.0, "is_gated": False}
MORTAL: DraftKeywords = {**PATIENT, "deadline_ms": 2_000.0}  # for a service that dies after it was asked
PARALLEL: DraftKeywords = {**PATIENT, "planner": "budget"}


@contextmanager
def draft_server() -> Iterator[DraftServer]:
    """The packed model as the draft of its dense self: it errs at times, because llama.cpp rounds activations."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    with DraftServer(model_path("smollm2-short"), threads=1) as server:
        yield server


def kill(server: DraftServer) -> None:
    """End the service at once; it is not started again."""
    server._process.kill()


def num_warnings(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
