"""Collecting with real models: features are Transformers' own, runs are what drafting would have given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specbranch.cli import app
from specbranch.engines.models import load_model
from specbranch.engines.torch.linear import Int8Linear, pack_linears
from specbranch.errors import EngineError
from specbranch.hrad.examples import CollectDtype, CollectOptions, collect, groups_of, read_answers, read_examples
from specbranch.trace import read_trace
from tests.models import model_path

_NEW = 16


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve answers of SmolLM2, which is its own draft; at temperature 1 it is then often wrong."""
    target = model_path("smollm2-135m-dense")
    directory = tmp_path_factory.mktemp("train")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"Which is larger, {n} or {3 * n}?"}) + "\n" for n in range(12)))
    arguments = ["train", "collect", str(target), "--draft", str(target), "--task", f"gsm8k={prompts}:12"]
    arguments += ["--max-tokens", str(_NEW), "--batch", "5", "--layers", "3", "--temperature", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(directory / "out")])
    assert result.exit_code == 0, result.output
    assert "12 prompts" in result.output
    return directory / "out"


def test_features_are_the_hidden_states_that_predicted_a_token_and_its_embedding(collection: Path) -> None:
    examples = read_examples([collection])
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path("smollm2-135m-dense"), dtype=torch.bfloat16)
    hidden_len = model.config.hidden_size
    row = 0
    for _, _, answer in read_answers(collection)[:4]:
        with torch.inference_mode():
            text = torch.tensor([[*answer.prompt, *answer.tokens]])
            hidden = model(text, output_hidden_states=True).hidden_states[-3:]
            tokens = model.get_input_embeddings()(text)[0]
        first = len(answer.prompt)
        count = len(answer.tokens) - 1
        mine = torch.from_numpy(examples.features[row : row + count].astype(np.float32)).split(hidden_len, dim=-1)
        for part, states in zip(mine, hidden, strict=False):
            true = states[0, first - 1 : first - 1 + count].float()
            assert (part - true).norm() < 0.05 * true.norm(), "the rest is bfloat16 and padding"
        assert torch.equal(mine[-1], tokens[first : first + count].float())
        row += count


def test_runs_are_what_a_drafted_window_would_have_given(collection: Path) -> None:
    """Draft greedily after a place, as the service does, and compare with what the target said."""
    examples = read_examples([collection])
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path("smollm2-135m-dense"), dtype=torch.bfloat16)
    row, num_equal, num_positions = 0, 0, 0
    for _, _, answer in read_answers(collection)[:6]:
        for place in range(0, len(answer.tokens) - 4, 3):
            text = [*answer.prompt, *answer.tokens[: place + 1]]
            drafted = 0
            with torch.inference_mode():
                while drafted < 3:
                    token = int(model(torch.tensor([text])).logits[0, -1].argmax())
                    if token != answer.tokens[place + 1 + drafted]:
                        break
                    text.append(token)
                    drafted += 1
            num_equal += min(int(examples.runs[row + place]), 3) == drafted
            num_positions += 1
        row += len(answer.tokens) - 1
    assert num_equal >= 0.75 * num_positions > 0, "all but those where bfloat16 decides"


@pytest.mark.parametrize(("dtype", "error"), [("auto", 0.05), ("int8", 0.15)])
def test_features_are_those_of_the_model_alone_also_after_others_of_the_batch_have_finished(
    dtype: CollectDtype, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.hrad.examples.end_ids", lambda *_: set(range(0, 50_000, 17)))
    path = str(model_path("smollm2-135m-dense"))
    options = CollectOptions(path, path, num_layers=2, max_new_tokens=24, batch=4, dtype=dtype)
    texts = ["Say yes.", "Say no.", "Count from one to ten in words.", "Name a colour."]

    collect(options, {"chat": texts}, tmp_path, lambda done, of: None)

    model = load_model(path, dtype=torch.float32).eval()
    if dtype == "int8":
        pack_linears(model, Int8Linear)
    examples, answers = read_examples([tmp_path]), [answer for _, _, answer in read_answers(tmp_path)]
    assert len({len(answer.tokens) for answer in answers}) > 1, "some must leave the batch before others"
    assert examples.card.dtype == dtype
    row = 0
    for answer in answers:
        first, count = len(answer.prompt), len(answer.tokens) - 1
        with torch.inference_mode():
            hidden = model(torch.tensor([[*answer.prompt, *answer.tokens]]), output_hidden_states=True).hidden_states
        mine = torch.from_numpy(examples.features[row : row + count, -2 * hidden[-1].shape[-1] :].astype(np.float32))
        true = hidden[-1][0, first - 1 : first - 1 + count]
        difference = (mine[:, : true.shape[1]] - true).norm() / true.norm()
        assert difference < error, "what differs is rounding; of int8 more, where a sum of padding tips it"
        row += count


def test_int8_is_refused_beside_a_gpu(tmp_path: Path) -> None:
    path = str(model_path("smollm2-135m-dense"))
    with pytest.raises(EngineError, match="for a CPU"):
        collect(CollectOptions(path, path, device="cuda", dtype="int8"), {"chat": ["Hi"]}, tmp_path, lambda *_: None)


def test_a_collection_that_was_cut_off_goes_on(collection: Path) -> None:
    """The last part is gone; only that one is made anew, and it is the same."""
    last = sorted(collection.glob("part-*.safetensors"))[-1]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in collection.glob("part-*.safetensors")}
    answers = read_trace(last.with_suffix(".jsonl.gz")).answers
    last.unlink()
    target = model_path("smollm2-135m-dense")
    arguments = ["train", "collect", str(target), "--draft", str(target), "--layers", "3", "--temperature", "1"]
    arguments += [
        "--task",
        f"gsm8k={collection.parent / 'prompts.jsonl'}:12",
        "--max-tokens",
        str(_NEW),
        "--batch",
        "5",
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(collection)])

    assert result.exit_code == 0, result.output
    for path in collection.glob("part-*.safetensors"):
        content, changed_ns = before[path.name]
        assert (path.stat().st_mtime_ns == changed_ns) == (path.name != last.name)
        assert path.name == last.name or path.read_bytes() == content
    assert [a.tokens for a in read_trace(last.with_suffix(".jsonl.gz")).answers] == [a.tokens for a in answers]


def test_fit_writes_a_predictor_with_its_card_and_scores(collection: Path, tmp_path: Path) -> None:
    out = tmp_path / "hrad"
    result = CliRunner().invoke(
        app, ["train", "fit", str(collection), "--out", str(out), "--window", "3", "--epochs", "2", "--json"]
    )

    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert set(document["scores"]) == {"majority", "features", "confidence", "both"}
    assert json.loads((out / "card.json").read_text())["num_layers"] == 3
    assert (out / "scores.png").stat().st_size > 10_000


def test_a_prompt_that_is_written_wrongly_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["train", "collect", "x", "--draft", "y", "--task", "gsm8k", "--out", str(tmp_path)]
    )

    assert result.exit_code == 2 and "TASK=FILE:COUNT" in result.output


class _Words:
    """A tokenizer for which a word is a token."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return chat[0]["content"]

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(range(len(text.split()))))


def test_long_prompts_are_answered_few_at_a_time() -> None:
    """Hidden states of all prompts of a group are held in memory at once."""
    texts = ["a " * length for length in (10, 12_000, 11, 12_000, 13, 30_000, 12)]
    groups = groups_of(_Words(), {"chat": texts}, size=3)

    assert [[len(one.tokens) for one in group] for group in groups] == [[10, 11, 12], [13, 12_000], [12_000], [30_000]]
