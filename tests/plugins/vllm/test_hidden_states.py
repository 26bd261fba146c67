"""Features of a target, and what is foreseen from them: a stand-in target with torch, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the stand-in target is made with torch")
pytest.importorskip("safetensors", reason="trained predictors are stored with safetensors")

from specbranch.core.round import AcceptanceHint, Signal
from specbranch.hrad.network import Hrad, HradError, read_hrad, write_hrad
from specbranch.plugins.vllm import SpecBranchProposer
from specbranch.plugins.vllm.hidden_states import FeatureError
from specbranch.plugins.vllm.settings import ProposerSettings
from tests.plugins.vllm.test_proposer import proposer_with, tokens

Module: Any = torch.nn.Module
LAYERS, WIDTH, VOCAB = 5, 4, 50
TARGET: dict[str, dict[str, Any]] = {
    "model": {
        "model": "large",
        "enforce_eager": True,
        "get_hidden_size": lambda: WIDTH,
        "get_total_num_hidden_layers": lambda: LAYERS,
        "get_vocab_size": lambda: VOCAB,
    },
    "parallel": {"use_ubatching": False, "tensor_parallel_size": 1},
}


class Layer(Module):  # type: ignore[misc]
    """As vLLM's: it writes to the residual that it was handed, and hands on a part of the state in each of two."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: Any, residual: Any) -> Any:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return torch.tanh(residual) * self.number + 0.1, residual


class Backbone(Module):  # type: ignore[misc]
    aux_hidden_state_layers = ()
    start_layer = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(number) for number in range(LAYERS)])


class Model(Module):  # type: ignore[misc]
    """A target whose hidden states can be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Backbone()
        self.table = torch.nn.Parameter(torch.randn(VOCAB, WIDTH))

    def embed_input_ids(self, ids: Any) -> Any:
        return self.table[ids]

    def forward(self, ids: Any) -> Any:
        hidden, residual = self.embed_input_ids(ids), None
        for layer in self.model.layers:
            hidden, residual = layer(hidden, residual)
        return (hidden + residual) * 2  # the final norm

    def hidden_states(self, token: int) -> list[Any]:
        """Of a text that ends with this token, as Transformers has them: there is no attention here."""
        states = [self.table[token]]
        for layer in range(LAYERS):
            states.append(states[-1] + torch.tanh(states[-1]) * layer + 0.1)
        states[-1] = states[-1] * 2
        return states

    def features(self, last: int, newest: int, num_layers: int) -> list[float]:
        parts = [*self.hidden_states(last)[-num_layers:], self.table[newest]]
        return torch.cat(parts).detach().tolist()  # type: ignore[no-any-return]


class Runner:
    """The part of vLLM's runner that a step goes through."""

    device = "cpu"
    is_new = True  # from vLLM 0.32 on

    def __init__(self, drafter: Any, model: Model) -> None:
        self.drafter = drafter
        self.model = model
        self.execute_model_state: Any = None
        self.input_batch: Any = None
        drafter.load_model(model)

    def execute_model(self, scheduler_output: Any) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=list(scheduler_output.texts), request_lora_mapping=np.zeros(8, dtype=np.int64)
        )
        self.requests = {name: SimpleNamespace(mm_features=[], sampling_params=None) for name in scheduler_output.texts}
        texts = scheduler_output.texts.values()
        padding = [0] * 3
        hidden = self.model(torch.tensor([*(token for text in texts for token in text), *padding]))
        drafts = [len(scheduler_output.scheduled_spec_decode_tokens.get(name, [])) for name in scheduler_output.texts]
        ends = np.cumsum([len(text) for text in texts])
        places = [place for end, num in zip(ends, drafts, strict=True) for place in range(end - num - 1, end)]
        metadata = SimpleNamespace(num_draft_tokens=drafts) if any(drafts) or self.is_new else None
        self.execute_model_state = SimpleNamespace(sample_hidden_states=hidden[places], spec_decode_metadata=metadata)

    def sample_tokens(self, *sampled: list[int]) -> Any:
        self.execute_model_state = None
        lengths, table = tokens(*([1, 2, 3, *new] for new in sampled))
        return self.drafter.propose(list(sampled), lengths, table)


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    fresh = type("GPUModelRunner", (Runner,), {"execute_model": Runner.execute_model})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=fresh))
    return fresh


def scheduled(drafts: dict[str, list[int]] | None = None, **texts: list[int]) -> Any:
    """A step over these tokens of each request, the last of them drafted."""
    return SimpleNamespace(
        texts=texts,
        num_scheduled_tokens={name: len(text) for name, text in texts.items()},
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_new_reqs=[],
    )


def trained(directory: Path, num_layers: int, hidden_len: int = WIDTH) -> str:
    """A predictor with random weights."""
    rng = np.random.default_rng(num_layers)
    d_in = (num_layers + 1) * hidden_len
    shapes = {"mean": [d_in], "scale": [d_in], "w0": [d_in, 6], "b0": [6], "w1": [6, 5], "b1": [5]}
    shapes |= {"w_class": [5, 3], "b_class": [3], "w_survival": [5, 2], "b_survival": [2]}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    card = {"target": "large", "draft": "small", "num_layers": num_layers, "hidden_len": hidden_len, "window": 2}
    write_hrad(directory, tensors, {**card, "tasks": [], "positions": 0, "commit": None})
    return str(directory)


def foreseeing(monkeypatch: pytest.MonkeyPatch, directory: Path, num_layers: int) -> SpecBranchProposer:
    return proposer_with(monkeypatch, target=TARGET, predictor=trained(directory, num_layers))


def outlooks_of(proposer: Any) -> list[AcceptanceHint | None]:
    found: list[AcceptanceHint | None] = proposer.core._client.hints
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The features that predictors are asked with."""
    found: list[Any] = []
    predict = Hrad.predict

    def noted(hrad: Hrad, features: Any, *more: Any) -> list[AcceptanceHint]:
        found.append(features)
        return predict(hrad, features, *more)

    monkeypatch.setattr(Hrad, "predict", noted)
    return found


def assert_outlooks(proposer: Any, directory: Path, asked: list[Any], rows: Sequence[list[float]]) -> None:
    assert asked[-1] == pytest.approx(np.array(rows), rel=1e-4)
    expected = read_hrad(directory).predict(np.array(rows, dtype=np.float32))
    assert [hint and hint.signal for hint in outlooks_of(proposer)] == [one.signal for one in expected]


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5])
def test_each_row_is_judged_where_its_newest_token_was_predicted(
    num_layers: int, monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path, asked: list[Any]
) -> None:
    """A prompt read, one in pieces, drafts that stood, some that fell, all that fell, and a row without drafts."""
    proposer = foreseeing(monkeypatch, tmp_path, num_layers)
    model = Model()
    runner = runner_class(proposer, model)
    drafts = {"c": [21, 22], "d": [31, 32], "e": [41, 42]}
    step = scheduled(drafts, a=[5, 6, 7], b=[8, 9], c=[20, 21, 22], d=[30, 31, 32], e=[40, 41, 42], f=[49])
    runner.execute_model(step)
    runner.sample_tokens([10], [], [21, 22, 23], [31, 33], [43], [48])

    last_and_newest = [(7, 10), (22, 23), (31, 33), (40, 43), (49, 48)]
    assert_outlooks(proposer, tmp_path, asked, [model.features(*one, num_layers) for one in last_and_newest])
    assert proposer.core.predictor.runner is not None
    assert (proposer.core.predictor.runner.counts.hints, proposer.core.predictor.runner.counts.hint_faults) == (5, 0)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_step_without_drafts_is_judged_in_old_and_new_vllm(
    is_new: bool, monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path, asked: list[Any]
) -> None:
    """Before 0.32 such a step has no metadata of drafts."""
    monkeypatch.setattr(runner_class, "is_new", is_new)
    proposer = foreseeing(monkeypatch, tmp_path, 2)
    model = Model()
    runner = runner_class(proposer, model)
    runner.execute_model(scheduled(a=[5, 6, 7], b=[8]))
    runner.sample_tokens([10], [11])

    assert_outlooks(proposer, tmp_path, asked, [model.features(*one, 2) for one in [(7, 10), (8, 11)]])


def test_the_target_says_the_same_with_and_without_a_tap(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path
) -> None:
    model, ids = Model(), torch.tensor([3, 1, 4, 1, 5])
    before = model(ids)
    runner = runner_class(foreseeing(monkeypatch, tmp_path, 4), model)
    runner.execute_model(scheduled(a=[3, 1, 4], b=[1, 5]))

    assert torch.equal(model(ids), before)


def test_without_a_trained_predictor_nothing_is_hooked_and_nothing_told(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner]
) -> None:
    proposer = proposer_with(monkeypatch)
    model = Model()
    runner = runner_class(proposer, model)
    runner.execute_model(scheduled(a=[1, 2]))
    runner.sample_tokens([3])

    assert outlooks_of(proposer) == [None]
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_only_the_layers_looked_at_are_hooked_and_other_settings_let_go_of_them(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path
) -> None:
    proposer = foreseeing(monkeypatch, tmp_path / "four", 4)
    model = Model()
    runner_class(proposer, model)

    def hooked() -> list[int]:
        return [layer.number for layer in model.model.layers if layer._forward_hooks]

    assert hooked() == [1, 2, 3]
    proposer.configure(ProposerSettings(predictor=trained(tmp_path / "two", 2)))
    assert hooked() == [3]
    proposer.configure(ProposerSettings(predictor=trained(tmp_path / "one", 1)))
    assert hooked() == []
    proposer.configure(ProposerSettings(predictor=str(tmp_path / "four")))
    assert hooked() == [1, 2, 3]
    proposer.configure(ProposerSettings(predictor="confidence"))
    assert hooked() == [] and proposer.feature_hook is None


def test_a_fault_in_a_step_is_counted_and_said_once_and_drafts_go_on(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that cannot be told apart, a step that nobody ran, one of another size, no numbers, an unknown state."""
    proposer = foreseeing(monkeypatch, tmp_path, 4)
    model = Model()
    runner: Any = runner_class(proposer, model)
    broken = scheduled(a=[1, 2])
    broken.num_scheduled_tokens = {}
    runner.execute_model(broken)
    assert runner.sample_tokens([3]) == [[5, 6]]
    assert runner.sample_tokens([3]) == [[5, 6]]
    runner.execute_model(scheduled(a=[1, 2]))
    assert runner.sample_tokens([3], [4]) == [[5, 6], [5, 6]]
    with torch.no_grad():
        model.table[7] = float("nan")
    runner.execute_model(scheduled(a=[1, 2]))
    assert runner.sample_tokens([7]) == [[5, 6]]

    assert proposer.feature_hook is not None
    proposer.feature_hook.begin(runner, scheduled(a=[1]))
    proposer.feature_hook.end(SimpleNamespace(execute_model_state=SimpleNamespace()))
    assert runner.sample_tokens([3]) == [[5, 6]]
    assert proposer.core.predictor.runner is not None
    assert (proposer.core.predictor.runner.counts.hints, proposer.core.predictor.runner.counts.hint_faults) == (0, 5)
    assert caplog.text.count("could not be read") == 1
    assert outlooks_of(proposer) == [None]


def test_a_step_without_work_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path
) -> None:
    proposer = foreseeing(monkeypatch, tmp_path, 1)
    runner = runner_class(proposer, Model())
    assert proposer.feature_hook is not None
    proposer.feature_hook.begin(runner, scheduled())
    proposer.feature_hook.end(runner)
    proposer.feature_hook.end(runner)

    assert proposer.feature_hook._step is None
    assert proposer.propose([[]], *tokens([1, 2])) == [[]]


@pytest.mark.parametrize(
    ("num_layers", "change", "message"),
    [
        (
            4,
            {"enforce_eager": False},
            "compiled model gives access to its last one only: start vLLM with enforce_eager.*--layers 1",
        ),
        (4, {"get_hidden_size": lambda: 8}, "size 4, large has 8; train one for this target"),
        (1, {"get_hidden_size": lambda: 8}, "train one for this target"),
        (6, {}, "needs 6 layers, the target has fewer"),
    ],
)
def test_a_predictor_that_cannot_work_here_is_refused_at_start(
    num_layers: int, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = {**TARGET, "model": {**TARGET["model"], **change}}
    with pytest.raises(FeatureError, match=message):
        proposer_with(monkeypatch, target=target, predictor=trained(tmp_path, num_layers))


def test_micro_batches_and_many_layers_do_not_go_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = {**TARGET, "parallel": {**TARGET["parallel"], "use_ubatching": True}}
    with pytest.raises(FeatureError, match="micro-batches"):
        proposer_with(monkeypatch, target=target, predictor=trained(tmp_path / "two", 2))

    assert proposer_with(monkeypatch, target=target, predictor=trained(tmp_path / "one", 1)).core.predictor.hrad


def test_one_layer_works_for_a_compiled_model(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path, asked: list[Any]
) -> None:
    target = {**TARGET, "model": {**TARGET["model"], "enforce_eager": False}}
    proposer = proposer_with(monkeypatch, target=target, predictor=trained(tmp_path, 1))
    model = Model()
    runner = runner_class(proposer, model)
    runner.execute_model(scheduled(a=[1, 2]))
    runner.sample_tokens([3])

    assert_outlooks(proposer, tmp_path, asked, [model.features(2, 3, 1)])


def test_a_directory_without_a_predictor_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(HradError, match=r"card.json: No such file"):
        proposer_with(monkeypatch, target=TARGET, predictor=str(tmp_path))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("start_layer", 2, "several pipeline stages"), ("layers", None, "cannot be found")],
)
def test_a_target_whose_layers_are_not_at_hand_is_refused_when_it_is_loaded(
    attribute: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proposer = foreseeing(monkeypatch, tmp_path, 4)
    model = Model()
    if value is None:
        delattr(model.model, attribute)
    else:
        setattr(model.model, attribute, value)

    with pytest.raises(FeatureError, match=message):
        proposer.load_model(model)


def test_a_target_that_shows_no_embeddings_is_refused_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proposer = foreseeing(monkeypatch, tmp_path, 1)
    with pytest.raises(FeatureError, match="gives no access to its input embeddings"):
        proposer.load_model(SimpleNamespace())
    model: Any = Model()
    model.embed_input_ids = lambda ids: ids  # what a stage without the table does
    with pytest.raises(FeatureError, match="not on the last pipeline stage"):
        proposer.load_model(model)


class SharedModel(Model):
    """Its embeddings take all ranks: after the start a look into them would wait for ever."""

    has_started = False
    num_asked = 0

    def embed_input_ids(self, ids: Any) -> Any:
        assert not self.has_started
        self.num_asked += len(ids)
        return super().embed_input_ids(ids)


def test_ranks_share_their_embeddings_at_start_and_only_then(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path
) -> None:
    target = {**TARGET, "parallel": {**TARGET["parallel"], "tensor_parallel_size": 2}}
    directory = trained(tmp_path, 1)
    proposer, other = (
        proposer_with(monkeypatch, is_output_rank=rank, target=target, predictor=directory) for rank in (True, False)
    )
    model, other_model = SharedModel(), SharedModel()
    other.load_model(other_model)
    proposer.load_model(model)
    assert model.num_asked == other_model.num_asked == 1 + VOCAB
    assert other.feature_hook is None and proposer.feature_hook is not None
    model.has_started = True

    proposer.feature_hook.begin(None, None)
    state = SimpleNamespace(
        sample_hidden_states=torch.zeros(1, WIDTH), spec_decode_metadata=SimpleNamespace(num_draft_tokens=[0])
    )
    proposer.feature_hook.end(SimpleNamespace(execute_model_state=state))
    features = proposer.feature_hook.read([[7]], [0])
    assert features.tolist() == [[0.0] * WIDTH + model.table[7].tolist()]
    for one in (proposer, other):
        one.configure(ProposerSettings(address="ipc:///nowhere", predictor=directory, deadline_ms=7))
    assert proposer.feature_hook is not None  # and the table was not read again: the model would have noticed


def test_every_signal_can_be_foreseen(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[Runner], tmp_path: Path
) -> None:
    proposer = foreseeing(monkeypatch, tmp_path, 4)
    runner = runner_class(proposer, Model())
    seen = set()
    for token in range(VOCAB):
        runner.execute_model(scheduled(a=[token]))
        runner.sample_tokens([1])
        seen |= {hint.signal for hint in outlooks_of(proposer) if hint}

    assert seen <= set(Signal) and len(seen) > 1
