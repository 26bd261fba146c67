"""Heads beside the torch engine: what they guess is what a hand computes, and distributions stay as they are."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")
transformers = pytest.importorskip("transformers", reason="the torch engine needs transformers")

from specbranch.core.distribution import Distribution  # noqa: E402
from specbranch.engines.heads import CARD, WEIGHTS, Heads, HeadsCard, HeadsError, read_heads, write_heads  # noqa: E402
from specbranch.engines.options import EngineOptions  # noqa: E402
from specbranch.engines.protocol import EngineError, Row  # noqa: E402
from specbranch.engines.torch import TorchEngine  # noqa: E402
from specbranch.engines.torch.int8 import can_int8  # noqa: E402

HIDDEN, VOCAB, WIDTH = 32, 64, 16


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = tmp_path_factory.mktemp("draft") / "tiny"
    model.save_pretrained(path)
    return path


def heads_of(**more: Any) -> Heads:
    rng = np.random.default_rng(0)
    card = HeadsCard(**{"draft": "tiny", "hidden_len": HIDDEN, "vocab_len": VOCAB, **more})
    shapes = ((WIDTH, 2 * card.hidden_len), (WIDTH,), (card.hidden_len, WIDTH))
    weights = (rng.normal(0, 0.5, shape).astype(np.float16) for shape in shapes)
    return Heads(card, np.arange(1, 60, 2, dtype=np.int32), *weights)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_heads(tmp_path / "heads", heads_of())
    return tmp_path / "heads"


def opened(draft: Path, heads: Path | None, dtype: str = "float32") -> TorchEngine:
    return TorchEngine(EngineOptions(str(draft), dtype=dtype, max_tokens=256, heads=str(heads) if heads else None))


def ran(engine: TorchEngine) -> list[Distribution]:
    one, other = engine.open(), engine.open()
    first = engine.run([Row(one, (5, 6, 7)), Row(other, (9, 3, 8, 2), num_outputs=3)])
    return first + engine.run([Row(other, (4,)), Row(one, (1, 2), num_outputs=2)])


def by_hand(draft: Path, heads: Heads, text: list[int]) -> tuple[int, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    with torch.inference_mode():
        out = model(torch.tensor([text]), output_hidden_states=True)
        hidden = out.hidden_states[-1][0, -1].numpy()
        first = int(out.logits[0, -1].argmax())
        seen = np.concatenate([hidden, model.get_input_embeddings().weight[first].numpy()])
        inner = heads.w_in.astype(np.float32) @ seen + heads.b_in
        made = hidden + heads.w_out.astype(np.float32) @ (inner / (1 + np.exp(-inner)))
        logits = model.get_output_embeddings().weight.numpy()[heads.tokens] @ made
    chances = np.exp(logits - logits.max())
    return int(heads.tokens[logits.argmax()]), float(chances.max() / chances.sum())


def test_a_guess_is_what_a_hand_computes(draft: Path, stored: Path) -> None:
    texts = [[5, 6, 7], [9, 3], [9, 3, 8], [9, 3, 8, 2], [9, 3, 8, 2, 4], [5, 6, 7, 1], [5, 6, 7, 1, 2]]

    for text, distribution in zip(texts, ran(opened(draft, stored)), strict=True):
        token, sureness = by_hand(draft, heads_of(), text)
        assert distribution.guess is not None
        assert distribution.guess[0] == token
        assert distribution.guess[1] == pytest.approx(sureness, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "w8a16"])
def test_distributions_are_the_same_with_heads_and_without(draft: Path, stored: Path, dtype: str) -> None:
    if dtype in ("int8", "w8a16") and not can_int8():
        pytest.skip("this build of torch has no int8 kernels")
    plain, guessing = ran(opened(draft, None, dtype)), ran(opened(draft, stored, dtype))

    assert [replace(one, guess=None) for one in guessing] == plain
    assert all(one.guess is None for one in plain)
    exact = [one.guess for one in ran(opened(draft, stored))]
    near = [one.guess for one in guessing]
    assert sum(a is not None and b is not None and a[0] == b[0] for a, b in zip(near, exact, strict=True)) >= 5


def test_heads_are_read_as_they_were_written(stored: Path) -> None:
    written, read = heads_of(), read_heads(stored)

    assert read.card == written.card
    for name in ("tokens", "w_in", "b_in", "w_out"):
        assert np.array_equal(getattr(read, name), getattr(written, name))


def test_heads_of_a_draft_of_another_size_are_refused(draft: Path, tmp_path: Path) -> None:
    write_heads(tmp_path, heads_of(draft="other", hidden_len=48))

    with pytest.raises(EngineError, match="trained for other"):
        opened(draft, tmp_path)


def test_heads_of_a_draft_of_another_name_only_warn(
    draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_heads(tmp_path, heads_of(draft="other"))

    with caplog.at_level(logging.WARNING):
        opened(draft, tmp_path)
    assert "trained for other" in caplog.text


def test_files_that_hold_no_heads_are_refused(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="specbranch train heads"):
        read_heads(tmp_path / "nowhere")
    card = json.loads((stored / CARD).read_text())
    (stored / CARD).write_text(json.dumps({**card, "version": 99}))
    with pytest.raises(HeadsError, match="version 99"):
        read_heads(stored)
    (stored / CARD).write_text(json.dumps({**card, "hidden_len": 33}))
    with pytest.raises(HeadsError, match="not those of the card"):
        read_heads(stored)
    (stored / CARD).write_text(json.dumps({**card, "vocab_len": 20}))
    with pytest.raises(HeadsError, match="does not have"):
        read_heads(stored)
    (stored / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(HeadsError, match="cannot be read"):
        read_heads(stored)


def test_llamacpp_refuses_heads(stored: Path) -> None:
    llamacpp = pytest.importorskip("specbranch.engines.llamacpp", reason="needs llama-cpp-python", exc_type=ImportError)

    with pytest.raises(EngineError, match="no heads"):
        llamacpp.LlamaCppEngine(EngineOptions("any.gguf", heads=str(stored)))
