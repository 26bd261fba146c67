"""Training heads with a real model: from prompts to a directory that the engine takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.engines.heads import read_heads
from specbranch.service.process import DraftOptions, DraftProcess
from specbranch.trace import NO_DISTRIBUTION, Answer, Header, Trace
from specbranch.train.heads import frequent_tokens, guess
from specbranch.train.states import Text
from tests.engines.models import model_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for two layers of SmolLM2, from its own answers and a trace."""
    draft = model_path("smollm2-short-dense")
    directory = tmp_path_factory.mktemp("heads")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"Which is larger, {n} or {3 * n}?"}) + "\n" for n in range(12)))
    counting = tuple(range(1000, 1040)) * 2
    answers = tuple(
        Answer(counting[first : first + 40], (NO_DISTRIBUTION,) * 40, (first + 1, 7)) for first in range(0, 32, 2)
    )
    Trace(Header(task="counting"), answers[1:]).write(directory / "train.jsonl")
    Trace(Header(task="counting"), answers[:2]).write(directory / "test.jsonl")
    arguments = ["train", "heads", str(draft), "--out", str(directory / "out"), "--task", f"gsm8k={prompts}:12"]
    arguments += ["--trace", str(directory / "train.jsonl"), "--test", str(directory / "test.jsonl")]
    arguments += ["--tokens", "128", "--width", "64", "--epochs", "30", "--max-tokens", "16", "--batch", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "counting" in result.output
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["scores"] == read_heads(directory / "out").card.scores, "the states were kept"
    return directory / "out"


def test_the_card_says_what_the_heads_are_for_and_what_they_can(trained: Path) -> None:
    heads = read_heads(trained)

    assert heads.card.draft == "smollm2-short-dense"
    assert heads.card.tasks == ["gsm8k", "counting"]
    assert len(heads.tokens) == 128
    assert list(heads.card.scores) == ["counting"]
    score = heads.card.scores["counting"]
    assert score["positions"] == 2 * 39
    assert all(0 <= score[name] <= 1 for name in ("first_right", "guess_right", "sure", "sure_right"))


def test_heads_guess_what_the_draft_goes_on_with(trained: Path) -> None:
    heads = read_heads(trained)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path("smollm2-short-dense"), dtype=torch.float32)
    tokens = torch.tensor([[1, 7, *range(1000, 1040), *range(1000, 1020)]])
    with torch.inference_mode():
        hidden = model.base_model(tokens).last_hidden_state[0]
        behind = model.get_output_embeddings()(hidden)[2:, heads.tokens.tolist()].argmax(-1)
    guesses, sureness = guess(heads, model, hidden[1:-1].numpy(), tokens[0, 2:].numpy())

    assert (guesses == heads.tokens[behind.numpy()]).mean() > 0.2
    assert ((sureness > 0) & (sureness <= 1)).all()


def test_tokens_of_answers_come_before_those_of_prompts() -> None:
    text = Text("a", np.array([5, 5, 5, 6, 7, 7, 8], dtype=np.int32), np.zeros((7, 2), dtype=np.float16), 4)

    assert frequent_tokens([text], 2).tolist() == [7, 8]
    assert frequent_tokens([text], 3).tolist() == [5, 7, 8]
    assert frequent_tokens([text], 6).tolist() == [0, 1, 5, 6, 7, 8]


def test_no_text_is_refused_with_a_way_out(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "heads", str(model_path("smollm2-short-dense")), "--out", str(tmp_path)])

    assert result.exit_code != 0
    assert "give more prompts or traces" in result.output


def test_a_trace_without_prompts_is_refused(tmp_path: Path) -> None:
    Trace(Header(), (Answer((1, 2, 3), (NO_DISTRIBUTION,) * 3),)).write(tmp_path / "bare.jsonl")
    arguments = ["train", "heads", str(model_path("smollm2-short-dense")), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--trace", str(tmp_path / "bare.jsonl")])

    assert result.exit_code != 0
    assert "without its prompts" in result.output


def test_the_draft_service_takes_the_heads(trained: Path) -> None:
    options = DraftOptions(str(model_path("smollm2-short-dense")), threads=1, extra=["--heads", str(trained)])

    with DraftProcess(options) as process:
        assert process.is_running


def test_the_draft_service_says_what_is_wrong_with_heads(tmp_path: Path) -> None:
    arguments = ["draft", str(model_path("smollm2-short-dense")), "--heads", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code != 0
    assert "holds no heads" in " ".join(result.output.split())
