"""A model that is not there is named in the first second, with the nearest one that is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specbranch.engines import models
from specbranch.engines.models import check_model_exists, weight_bytes
from specbranch.errors import EngineError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBRANCH_MODELS", str(tmp_path))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (tmp_path / "good" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "broken.gguf").write_bytes(b"<html>")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def no_hub(refusal: str | None = None, unknown: str | None = None) -> object:
    return lambda repository: models.HubAnswer(refusal, unknown)


@pytest.mark.parametrize("model", ["good", "whole.gguf"])
def test_what_is_there_is_not_refused(store: Path, model: str) -> None:
    assert check_model_exists("TARGET", model) is None


def test_what_is_in_a_store_of_vllm_is_left_to_vllm(store: Path) -> None:
    assert "s3://bucket/model was not checked" in str(check_model_exists("TARGET", "s3://bucket/model"))


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("/nope/model", "TARGET: there is no /nope/model"),
        ("./nope", "there is no nope"),
        ("wole.gguf", "there is no wole.gguf"),
        ("a/b/c", "there is no a/b/c"),
        ("empty", "neither config.json nor a GGUF file"),
        ("broken.gguf", "not a GGUF file; was its download interrupted?"),
        ("notes.txt", "name a directory with config.json, or a GGUF file"),
        ("goood", "not on the Hugging Face hub either; did you mean 'good'?"),
        ("owner/name", "'owner/name' was not found: it is not a path here, not in $SPECBRANCH_MODELS, and not on"),
    ],
)
def test_what_is_not_there_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch, model: str, cause: str) -> None:
    monkeypatch.setattr(models, "ask_hub", no_hub("not on the Hugging Face hub either"))
    with pytest.raises(EngineError) as refused:
        check_model_exists("TARGET", model)
    assert cause in str(refused.value)
    assert str(refused.value).startswith("TARGET")


def test_a_near_name_beside_a_wrong_path_is_named(store: Path) -> None:
    with pytest.raises(EngineError, match=r"did you mean 'good'\?"):
        check_model_exists("TARGET", str(store / "goud"))


def test_a_name_on_the_hub_is_left_to_the_libraries(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ask_hub", no_hub())
    for model in ("owner/name", "owner/name:file.gguf", "owner/name:folder/file.gguf"):
        assert check_model_exists("--draft", model) is None


def test_a_hub_that_does_not_answer_is_not_waited_for(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(models, "_HUB_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    is_over = threading.Event()
    heard: list[bool] = []
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: heard.append(is_over.wait(120)))

    left_open = check_model_exists("TARGET", "owner/name")  # to the libraries, which try again
    assert left_open is not None and "the hub did not answer within 0.2 s" in left_open
    assert heard == [], "the hub has answered before"
    is_over.set()


def test_without_the_network_it_is_not_read_either(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(store))

    with pytest.raises(EngineError, match="HF_HUB_OFFLINE"):
        check_model_exists("TARGET", "owner/name")
    (store / "models--owner--name" / "snapshots" / "abc").mkdir(parents=True)
    check_model_exists("TARGET", "owner/name")


def test_weights_grow_with_the_data_type(store: Path) -> None:
    assert weight_bytes("good") == weight_bytes("good", "auto") == weight_bytes("good", "bfloat16") == 1000
    assert weight_bytes("good", "float32") == 2000
    assert weight_bytes("whole.gguf", "float32") == 64
    assert weight_bytes("owner/name") == 0
    (store / "good" / "consolidated.safetensors").write_bytes(bytes(1000))  # the same weights in another layout
    assert weight_bytes("good") == 1000
