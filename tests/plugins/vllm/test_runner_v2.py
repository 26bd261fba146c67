"""Model Runner V2 without vLLM: which runner is chosen, how our speculator gets in, and texts on the host."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbranch.core.planners import SettingError
from specbranch.plugins.vllm import compat, register
from specbranch.plugins.vllm.runner_v2_device import HostTokens
from specbranch.plugins.vllm.settings import PROPOSER, LayoutError, RunnerError, read_settings


class FakeConfig:
    """vLLM's configuration: it chooses V2 for the methods that V2 knows, if it can at all."""

    def __init__(
        self, can_v2: bool = True, method: str = "custom_class", model: str = PROPOSER, **section: Any
    ) -> None:
        self.speculative_config = SimpleNamespace(method=method, model=model)
        self.additional_config = {"specbranch": section}
        self.can_v2 = can_v2
        self.verified: list[str] = []

    def __post_init__(self) -> None:
        self.verified.append(self.speculative_config.method)

    @property
    def use_v2_model_runner(self) -> bool:
        return self.can_v2 and self.speculative_config.method != "custom_class"


def chosen(config: FakeConfig) -> str:
    register.choose_runner(config)
    return str(config.speculative_config.method)


def test_v1_is_used_unless_another_runner_is_asked_for() -> None:
    assert chosen(FakeConfig()) == "custom_class"
    assert chosen(FakeConfig(runner="v1")) == "custom_class"
    assert chosen(FakeConfig(runner="v2")) == "ngram_gpu"


def test_vllm_decides_between_its_runners_where_that_is_left_to_it() -> None:
    assert chosen(FakeConfig(runner="auto")) == "ngram_gpu"
    assert chosen(FakeConfig(can_v2=False, runner="auto")) == "custom_class"


def test_a_trained_predictor_runs_on_v1() -> None:
    assert chosen(FakeConfig(predictor="/somewhere/hrad", runner="auto")) == "custom_class"
    with pytest.raises(RunnerError, match="trained predictor"):
        chosen(FakeConfig(predictor="/somewhere/hrad", runner="v2"))


def test_what_is_asked_for_and_cannot_be_is_refused() -> None:
    with pytest.raises(RunnerError, match="'auto'"):
        chosen(FakeConfig(can_v2=False, runner="v2"))
    with pytest.raises(SettingError, match="v1, v2, auto"):
        chosen(FakeConfig(runner="v3"))


def test_other_methods_are_left_alone() -> None:
    for config in (FakeConfig(method="eagle"), FakeConfig(model="their.Proposer")):
        before = config.speculative_config.method
        assert chosen(config) == before
    config = FakeConfig()
    config.speculative_config = None  # type: ignore[assignment]
    register.choose_runner(config)


def test_v1_refuses_to_stand_in_for_v2() -> None:
    compat.check_runner(FakeConfig(method="ngram_gpu"))
    with pytest.raises(RunnerError, match="VLLM_PLUGINS"):
        compat.check_runner(FakeConfig())


def test_the_choice_comes_before_vllm_verifies_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """And our speculator is made where vLLM would make the one for n-grams; its own ones are made by itself."""
    fresh = type("VllmConfig", (FakeConfig,), {"__post_init__": FakeConfig.__post_init__})
    package = SimpleNamespace(init_speculator=lambda config, device, states: "theirs")
    model_runner = SimpleNamespace(init_speculator=package.init_speculator)
    worker = SimpleNamespace(gpu=SimpleNamespace(spec_decode=package))
    for name, module in {
        "vllm": SimpleNamespace(v1=SimpleNamespace(worker=worker)),
        "vllm.config": SimpleNamespace(),
        "vllm.config.vllm": SimpleNamespace(VllmConfig=fresh),
        "vllm.v1": SimpleNamespace(worker=worker),
        "vllm.v1.worker": worker,
        "vllm.v1.worker.gpu": worker.gpu,
        "vllm.v1.worker.gpu.spec_decode": package,
        "vllm.v1.worker.gpu.model_runner": model_runner,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(register, "_speculator", lambda: lambda config, device, states: "ours")
    register.install()
    register.install()
    config: Any = fresh(runner="v2")
    config.__post_init__()

    assert config.verified == ["ngram_gpu"]
    assert package.init_speculator(config, "device", "states") == "ours"
    assert model_runner.init_speculator is package.init_speculator
    assert package.init_speculator(FakeConfig(method="ngram_gpu", model="ngram_gpu"), "", "") == "theirs"


def test_a_vllm_without_v2_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    register.install()


def test_prefill_context_parallelism_is_refused() -> None:
    compat.check_context_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=1)))
    with pytest.raises(LayoutError, match="2 ranks"):
        compat.check_context_parallelism(
            SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=2))
        )


def test_rows_of_v2_stand_aside_as_those_of_v1() -> None:
    lora = SimpleNamespace(lora_ids=np.array([0, 7, 0, 0, 0]))
    cache = SimpleNamespace(mm_features={"c": ["image"], "a": []})
    states = SimpleNamespace(
        temperature=SimpleNamespace(np=np.array([0.0, 0.0, 0.7, 0.0, 0.7])),
        seeds=SimpleNamespace(np=np.array([5, 6, 7, 8, 9])),
        seeds_set=np.array([False, False, True, True, False]),
    )
    sampler = SimpleNamespace(sampling_states=states)
    model_runner = SimpleNamespace(lora_state=lora, encoder_cache=cache, sampler=sampler)
    texts = [(np.array([1, 2]), 1)] * 5
    rows = compat.v2_rows(model_runner, ["a", "b", "c", "d", "e"], [3, 1, 0, 2, 4], texts, {})

    assert [row.skip_cause for row in rows] == [None, "lora", "multimodal", "seed", None]
    assert [row.is_sampled for row in rows] == [False, False, False, True, True]
    model_runner.encoder_cache = None
    assert compat.v2_rows(model_runner, ["a"], [0], texts[:1], {})[0].skip_cause is None
    assert compat.v2_rows(None, ["a"], [0], texts[:1], {})[0].is_sampled, "nobody knows"


def test_vllms_own_requests_are_known() -> None:
    assert compat.is_warmup(["_warmup_0_", "_v2_mixed_warmup_decode_"])
    assert not compat.is_warmup(["_warmup_0_", "chatcmpl-1"])


def test_settings_name_the_runner() -> None:
    assert read_settings({"runner": "v2"}).runner == "v2"
    assert read_settings({}).runner == "v1"


def test_settings_name_the_rule() -> None:
    assert read_settings({"rule": "auto", "runner": "v2"}).rule == "auto"
    assert read_settings({}).rule == "match"
    with pytest.raises(SettingError, match="set `runner` to 'v2', or leave `rule` out"):
        read_settings({"rule": "auto"})


class Device:
    """Whole texts as a device has them; remembers who was read."""

    def __init__(self, **texts: list[int]) -> None:
        self.texts = texts
        self.slots = {name: slot for slot, name in enumerate(texts)}
        self.read: list[int] = []

    def whole(self, slot: int, length: int) -> Any:
        self.read.append(slot)
        return np.array(list(self.texts.values())[slot][:length])


def test_a_text_is_read_whole_once_and_then_grows_by_what_a_step_adds() -> None:
    device = Device(a=[1, 2, 3, 4, 5, 6], b=[7, 8])
    texts = HostTokens(2, 6, device.whole)
    first = texts.extend(0, "a", 3, 2, np.array([3])).tolist()
    other = texts.extend(1, "b", 2, 7, np.array([8])).tolist()
    second = texts.extend(0, "a", 6, 3, np.array([4, 5, 6])).tolist()

    assert (first, second, other) == ([1, 2, 3], [1, 2, 3, 4, 5, 6], [7, 8])
    assert device.read == [0, 1]


@pytest.mark.parametrize(
    ("name", "length", "before", "new"),
    [("b", 4, 3, [4]), ("a", 5, 4, [5]), ("a", 4, 9, [4]), ("a", 3, 2, [3])],
    ids=["another request", "a step was missed", "another text", "shorter"],
)
def test_a_text_that_does_not_go_on_is_read_again(name: str, length: int, before: int, new: list[int]) -> None:
    device = Device(a=[1, 2, 3, 4, 5])
    texts = HostTokens(1, 6, device.whole)
    texts.extend(0, "a", 3, 2, np.array([3]))

    assert texts.extend(0, name, length, before, np.array(new)).tolist() == [1, 2, 3, 4, 5][:length]
    assert device.read == [0, 0]
