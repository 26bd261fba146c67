"""Stock llama-cpp-python with drafts from a real service: the output is that of the same `Llama` alone."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import llama_cpp

from specbranch import DraftServer, SpecBranchError
from specbranch.draft_server import DraftKeywords
from specbranch.engines.llamacpp import gguf_path
from tests.engines.models import model_path
from tests.plugins.texts import MORTAL, NUM_TOKENS, PARALLEL, PATIENT, PROMPTS, draft_server, kill, num_warnings
from tests.service.harness import scripted_service

pytestmark = pytest.mark.timeout(600)
SAMPLED = {"temp": 0.8, "top_k": 40}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, short, with its weights unpacked to 32 bits: how many tokens a batch has decides no token then."""
    path = tmp_path_factory.mktemp("dense") / "smollm2-f32.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    source = gguf_path(str(model_path("smollm2-short")))
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftServer]:
    with draft_server() as server:
        yield server


def llama(target: Path, draft_model: Any = None) -> Any:
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(
        str(target), n_ctx=256, n_threads=1, n_threads_batch=1, seed=7, verbose=False, draft_model=draft_model, **cache
    )


def decode(llm: Any, prompts: Sequence[str], **sampling: Any) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        llm.reset()
        stream = llm.generate(llm.tokenize(prompt.encode()), **{"temp": 0.0, **sampling})
        texts.append([next(stream) for _ in range(NUM_TOKENS)])
    return texts


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return decode(llama(target), PROMPTS)


@pytest.mark.parametrize("how", [PATIENT, PARALLEL], ids=lambda how: how["planner"])
def test_greedy_output_equals_that_of_the_same_llama_alone(
    target: Path, plain: Sequence[list[int]], draft: DraftServer, how: DraftKeywords
) -> None:
    model = draft.llamacpp_draft(target, **how)

    assert decode(llama(target, model), PROMPTS) == plain
    if how is PATIENT:
        assert model.num_accepted > 100


def test_sampled_output_is_the_same_for_the_same_seed(target: Path, draft: DraftServer) -> None:
    model = draft.llamacpp_draft(target, **PATIENT)
    alone, drafted = (decode(llama(target, one), PROMPTS[:4], **SAMPLED) for one in (None, model))

    assert drafted == alone
    assert model.num_accepted > 5


def test_a_service_that_is_killed_in_the_middle_of_a_text_changes_nothing(
    target: Path, plain: Sequence[list[int]]
) -> None:
    with draft_server() as server:
        model = server.llamacpp_draft(target, **MORTAL)
        llm = llama(target, model)
        stream = llm.generate(llm.tokenize(PROMPTS[0].encode()), temp=0.0)
        text = [next(stream) for _ in range(NUM_TOKENS // 2)]
        accepted = model.num_accepted
        kill(server)
        text += [next(stream) for _ in range(NUM_TOKENS // 2)]
        rest = decode(llm, PROMPTS[1:3])

    assert [text, *rest] == plain[:3]
    assert accepted > 0
    assert model.num_accepted < accepted + NUM_TOKENS // 2


def test_a_draft_with_another_vocabulary_is_told_of_once_and_not_used(
    target: Path, plain: Sequence[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_service(tmp_path) as service:
        model = DraftServer.at(service.address).llamacpp_draft(target, **PATIENT)
        texts = decode(llama(target, model), PROMPTS[:4])

    assert texts == plain[:4]
    assert model.num_accepted == 0
    assert num_warnings(caplog, "another vocabulary") == 1


def test_a_recurrent_target_is_refused(draft: DraftServer, tmp_path: Path) -> None:
    """A file that says of itself to be Mamba; no more than its head is read."""
    data = gguf_path(str(model_path("smollm2-short"))).read_bytes()
    name = b"general.architecture" + struct.pack("<IQ", 8, 5)
    assert name + b"llama" in data
    (tmp_path / "mamba.gguf").write_bytes(data.replace(name + b"llama", name + b"mamba", 1))

    with pytest.raises(SpecBranchError, match=r"mamba\.gguf is a recurrent or hybrid .* leave draft_model out"):
        draft.llamacpp_draft(tmp_path / "mamba.gguf")


def test_a_target_that_is_no_file_of_this_machine_is_refused(draft: DraftServer) -> None:
    with pytest.raises(SpecBranchError, match="no model 'nowhere"):
        draft.llamacpp_draft("nowhere.gguf")
