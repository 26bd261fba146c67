"""Stock Transformers with drafts from a real service: the output is that of the model alone."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import torch
import transformers

from specbranch import DraftServer, SpecBranchError
from specbranch.draft_server import DraftKeywords
from specbranch.exactness.statistics import compare_counts, count_pairs
from specbranch.plugins.transformers import DraftedDecoding, ServiceCandidates
from tests.models import model_path
from tests.service.harness import scripted_service

pytestmark = pytest.mark.timeout(600)
SUBJECTS = ("water", "the moon", "a fox", "bread")
BEGINNINGS = ("Here is a story about", "The most important fact about", "def count_words(text):  #", "A poem about")
PROMPTS = [f"{start} {subject}" for subject in SUBJECTS for start in BEGINNINGS]
NUM_TOKENS = 24
# It waits for every draft, so that what is accepted does not depend on how busy the machine is.
PATIENT: DraftKeywords = {"planner": "sps", "max_draft_tokens": 4, "deadline_ms": 60_000.0, "is_gated": False}
MORTAL: DraftKeywords = {**PATIENT, "deadline_ms": 2_000.0}  # for a service that dies after it was asked
PARALLEL: DraftKeywords = {**PATIENT, "planner": "budget"}
GREEDY = {"do_sample": False, "max_new_tokens": NUM_TOKENS}


@contextmanager
def draft_server() -> Iterator[DraftServer]:
    """Serve the packed model as the draft of its dense self; it errs at times, as llama.cpp rounds activations."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    with DraftServer(model_path("smollm2-short"), threads=1) as server:
        yield server


def kill(server: DraftServer) -> None:
    """End the service at once; it is not started again."""
    server._process.kill()


def num_warnings(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_path("smollm2-short-dense"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path("smollm2-short-dense"))
    return [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftServer]:
    with draft_server() as server:
        yield server


@pytest.fixture(scope="module")
def plain(model: Any, prompts: Sequence[Any]) -> list[list[int]]:
    return [model.generate(**prompt, **GREEDY)[0].tolist() for prompt in prompts]


class Listener:
    """A streamer that keeps what it is given, and lets a deed be done in the middle of a text."""

    def __init__(self, after: int = -1, deed: Any = None) -> None:
        self.tokens: list[int] = []
        self.has_ended = False
        self._after, self._deed = after, deed

    def put(self, tokens: Any) -> None:
        self.tokens += tokens.flatten().tolist()
        if self._deed is not None and len(self.tokens) > self._after:
            self._deed()
            self._deed = None

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("how", [PATIENT, PARALLEL], ids=lambda how: how["planner"])
def test_greedy_output_equals_that_of_the_model_alone(
    model: Any, prompts: Sequence[Any], plain: Sequence[list[int]], draft: DraftServer, how: DraftKeywords
) -> None:
    arguments = draft.transformers_args(**how)
    drafted = [model.generate(**prompt, **GREEDY, **arguments)[0].tolist() for prompt in prompts]

    assert drafted == plain
    if how is PATIENT:
        assert arguments["custom_generate"].num_accepted > 100


def test_a_service_that_is_killed_in_the_middle_of_a_text_changes_nothing(
    model: Any, prompts: Sequence[Any], plain: Sequence[list[int]]
) -> None:
    with draft_server() as server:
        arguments = server.transformers_args(**MORTAL)
        before: list[int] = []

        def end_it() -> None:
            before.append(arguments["custom_generate"].num_accepted)
            kill(server)

        listener = Listener(len(plain[0]) - NUM_TOKENS // 2, end_it)
        texts = [model.generate(**prompts[0], **GREEDY, **arguments, text_streamer=listener)[0].tolist()]
        texts += [model.generate(**prompt, **GREEDY, **arguments)[0].tolist() for prompt in prompts[1:3]]

    assert texts == plain[:3]
    assert before and before[0] > 0
    assert listener.tokens == plain[0] and listener.has_ended
    assert arguments["custom_generate"].num_accepted < before[0] + NUM_TOKENS // 2


def test_a_draft_with_another_vocabulary_is_told_of_once_and_not_used(
    model: Any, prompts: Sequence[Any], plain: Sequence[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_service(tmp_path) as service:
        arguments = DraftServer.at(service.address).transformers_args(**PATIENT)
        texts = [model.generate(**prompt, **GREEDY, **arguments)[0].tolist() for prompt in prompts[:4]]

    assert texts == plain[:4]
    assert arguments["custom_generate"].num_accepted == 0
    assert num_warnings(caplog, "another vocabulary") == 1


def test_what_takes_no_drafts_is_decoded_without_and_told_of_once(
    model: Any, prompts: Sequence[Any], draft: DraftServer, caplog: pytest.LogCaptureFixture
) -> None:
    class AfterTen(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.tensor([input_ids.shape[1] >= len(prompts[0]["input_ids"][0]) + 10] * len(input_ids))

    both = torch.cat([prompts[0]["input_ids"], prompts[0]["input_ids"].flip(1)])
    arguments = draft.transformers_args(**PATIENT)
    for inputs in (
        {"input_ids": both, "attention_mask": torch.ones_like(both)},
        {**prompts[0], "stopping_criteria": [AfterTen()]},
        {**prompts[0], "guidance_scale": 1.5},
        {**prompts[0], "cache_implementation": "static"},
        {**prompts[0], "use_cache": False},
    ):
        for _ in range(2):
            drafted = model.generate(**inputs, **GREEDY, **arguments)
        assert drafted.tolist() == model.generate(**inputs, **GREEDY).tolist()

    assert arguments["custom_generate"].num_accepted == 0
    assert num_warnings(caplog, "drafts do not support") == 4
    for words in (
        "several texts",
        "AfterTen",
        "UnbatchedClassifierFreeGuidance",
        "a cache that is not a new dynamic one",
    ):
        assert num_warnings(caplog, f"drafts do not support {words}") == 1


def test_beams_are_refused_with_the_way_out(model: Any, prompts: Sequence[Any], draft: DraftServer) -> None:
    with pytest.raises(SpecBranchError, match="leave out what asks for beam_search"):
        model.generate(**prompts[0], num_beams=2, max_new_tokens=4, **draft.transformers_args(**PATIENT))


class Likely:
    """Proposes the first choices of the model itself, in place of a service."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_proposed = 0
        self.recurring: set[bool] = set()

    def announce_prompt(self, prompt: Any) -> None:
        pass

    def after(self, text: Any, room: int, has_recurring_noise: bool) -> list[int]:
        self.recurring.add(has_recurring_noise)
        tokens = text.tolist()
        for _ in range(min(2, room)):
            tokens.append(int(self._model(torch.tensor([tokens])).logits[0, -1].argmax()))
        draft: list[int] = tokens[len(text) :]
        self.num_proposed += len(draft)
        return draft


def test_sampled_output_has_the_distribution_of_the_model_alone() -> None:
    """Two samples of 700 short texts; a false alarm has a probability of one in ten thousand."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.6,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    decoding = DraftedDecoding.__new__(DraftedDecoding)
    likely = Likely(model)
    decoding._drafts = {model: likely}  # type: ignore[assignment]
    prompt = torch.tensor([[1, 2, 3]])
    sampling = {
        "do_sample": True,
        "top_k": 4,
        "temperature": 1.5,
        "max_new_tokens": 4,
        "attention_mask": torch.ones_like(prompt),
    }

    def sample(**arguments: Any) -> list[tuple[int, ...]]:
        return [tuple(model.generate(prompt, **sampling, **arguments)[0, 3:].tolist()) for _ in range(700)]

    alone, drafted = sample(), sample(custom_generate=decoding)
    found = compare_counts(*count_pairs(alone, drafted), 1e-4, np.random.default_rng(0))

    assert likely.num_proposed > 700
    assert likely.recurring == {True}, "such a text teaches no other: it may have been made with a seed"
    assert len(set(alone)) > 30
    assert found.p_value > 1e-4


def test_greedy_text_may_teach_others() -> None:
    likely = Likely(lambda text: SimpleNamespace(logits=torch.zeros(1, len(text[0]), 4)))
    candidates = ServiceCandidates(likely, transformers.GenerationConfig(max_length=9))  # type: ignore[arg-type]
    for _ in range(2):
        candidates.get_candidates(torch.tensor([[1, 2, 3]]))

    assert likely.recurring == {False}


def test_it_relies_on_names_that_transformers_has() -> None:
    loop = transformers.generation.GenerationMixin._assisted_decoding
    assert "_get_candidate_generator" in loop.__code__.co_names
    assert {"logits_processor", "stopping_criteria", "generation_config", "streamer"} <= set(loop.__code__.co_varnames)
