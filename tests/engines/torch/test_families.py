"""Tiny models of the families that people run: exact on the fast engine or the generic one, or refused; never wrong.

`studies/12-families/run.py` tries all, nightly; here are those whose attention, cache or positions differ.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")
pytest.importorskip("transformers", reason="the torch engine needs transformers")

from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.torch import TorchEngine, open_torch
from specbranch.engines.torch import engine as engine_module
from specbranch.engines.torch.generic import NUM_STATES, GenericEngine
from specbranch.engines.torch.kv_store import StateStore
from specbranch.engines.torch.linear import can_int8
from tests.engines.closeness import close_distributions
from tests.engines.conformance import Close, EngineConformance, fresh_distribution
from tests.root import ROOT

FAST = (
    *("llama, longrope", "qwen2, window", "phi3, longrope", "gemma2", "gemma3_text", "gpt_oss", "granitemoehybrid"),
    *("deepseek_v3", "nemotron", "mistral3", "hunyuan_v1_moe"),
)
STATES = ("lfm2", "qwen3_5_text", "granitemoehybrid, mamba", "falcon_h1", "jamba")
GENERIC = ("diffllama", "minimax", "llama4_text", "deepseek_v32")
CONFORMING = ("gemma3_text", "gpt_oss", "phi3, longrope", "granitemoehybrid", "lfm2", "qwen3_5_text", "minimax")


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", ROOT / "studies" / "12-families" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*FAST, *STATES, *GENERIC])
def test_a_family_is_exact(name: str, families: ModuleType) -> None:
    found = families.try_family(name)

    assert found["outcome"] == ("fast" if name in FAST else "states" if name in STATES else "generic"), found
    assert found["error"] < 1e-5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_family_is_wrong(families: ModuleType) -> None:
    found = [families.try_family(name) for name in families.FAMILIES]

    assert all(one["outcome"] in ("fast", "states", "generic", "refused") for one in found)
    assert max(one.get("error", 0.0) for one in found) < families.ROUNDING
    assert sum("error" in one for one in found) >= 60


def test_the_histories_tell_a_window_from_none(families: ModuleType, tmp_path: Path) -> None:
    """Without this the tests above would pass for an engine that ignores windows."""
    windowed, full = tmp_path / "windowed", tmp_path / "full"
    families.save_tiny("mistral, window", windowed)
    families.save_tiny("mistral", full)
    engines = [
        open_torch(EngineOptions(str(path), dtype="float32", max_tokens=1024, top_k=128)) for path in (windowed, full)
    ]

    apart = [
        not close_distributions(mine, other, 1e-3)
        for (_, mine), (_, other) in zip(*(families.histories(engine) for engine in engines), strict=True)
    ]
    assert sum(apart) > 10


@pytest.mark.parametrize("name", ["gemma3_text", "hunyuan_v1_moe", "phi3, longrope", "lfm2", "qwen3_5_text"])
@pytest.mark.skipif(not can_int8(), reason="this build of torch has no int8 kernels")
def test_a_family_runs_in_8_bits(name: str, families: ModuleType, tmp_path: Path) -> None:
    families.save_tiny(name, tmp_path)
    engines = [
        open_torch(EngineOptions(str(tmp_path), dtype=dtype, max_tokens=1024, top_k=128))
        for dtype in ("float32", "int8")
    ]

    distances = []
    for (_, whole), (_, packed) in zip(*(families.histories(engine) for engine in engines), strict=True):
        apart = {token: float(prob) for token, prob in zip(whole.ids, whole.probs, strict=True)}
        for token, prob in zip(packed.ids, packed.probs, strict=True):
            apart[token] -= float(prob)
        distances.append(sum(map(abs, apart.values())) / 2)
    assert 0 < sum(distances) / len(distances) < 0.15


@pytest.fixture(scope="module", params=[(name, dtype) for name in CONFORMING for dtype in ("float32", "int8")])
def opened(
    request: pytest.FixtureRequest, families: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftEngine, str]:
    name, dtype = request.param
    if dtype == "int8" and not can_int8():
        pytest.skip("this build of torch has no int8 kernels")
    path = tmp_path_factory.mktemp("tiny")
    families.save_tiny(name, path)
    return open_torch(EngineOptions(str(path), dtype=dtype, max_tokens=2048)), dtype


class TestConformance(EngineConformance):
    @pytest.fixture
    def engine(self, opened: tuple[DraftEngine, str]) -> DraftEngine:
        return opened[0]

    @pytest.fixture
    def is_close(self, opened: tuple[DraftEngine, str]) -> Close:
        # Sums in another order may tip an integer of 8 bits, and a recurrent layer carries that on.
        return close_distributions if opened[1] == "float32" else partial(close_distributions, tolerance=0.1)


def test_the_generic_engine_keeps_few_caches_and_frees_them(families: ModuleType, tmp_path: Path) -> None:
    families.save_tiny("minimax", tmp_path)
    engine = open_torch(EngineOptions(str(tmp_path), dtype="float32", max_tokens=1024))
    assert isinstance(engine, GenericEngine)

    for _ in families.histories(engine):
        pass
    handle = engine.open()
    for token in range(40):
        engine.run([Row(handle, (token,))])

    assert len(engine._sequences[handle].states) == NUM_STATES and engine.num_bytes > 0
    engine.close(handle)
    assert engine.num_bytes == engine.num_tokens == 0


@pytest.fixture(params=["lfm2", "qwen3_5_text", "jamba"])
def recurrent(request: pytest.FixtureRequest, families: ModuleType, tmp_path: Path) -> tuple[TorchEngine, StateStore]:
    families.save_tiny(request.param, tmp_path)
    engine = open_torch(EngineOptions(str(tmp_path), dtype="float32", max_tokens=1024, top_k=128))
    assert isinstance(engine, TorchEngine) and engine.states is not None
    return engine, engine.states


def test_forks_run_as_one_batch_from_the_state_of_their_trunk(recurrent: tuple[TorchEngine, StateStore]) -> None:
    engine, states = recurrent
    trunk = engine.open()
    engine.run([Row(trunk, tuple(range(5, 45)))])
    rows = [Row(engine.fork(trunk, 40), (token,)) for token in (3, 4, 5, 6)]
    together = engine.run(rows)
    (group,) = states.groups
    alone = [fresh_distribution(engine, [*range(5, 45), *row.tokens]) for row in rows]

    assert group.tokens.shape == (4, 1) and group.sources is not None and len(set(group.sources.tolist())) == 1
    assert all(close_distributions(*pair, 1e-5) for pair in zip(together, alone, strict=True))


@pytest.mark.parametrize("num_states", [0, 1, 3])
def test_a_state_that_made_room_only_costs_running_tokens_again(
    num_states: int, recurrent: tuple[TorchEngine, StateStore], families: ModuleType
) -> None:
    engine, states = recurrent
    expected = [found for _, found in families.histories(engine)]
    states.resize(1024, num_states)

    found = [found for _, found in families.histories(engine)]
    assert len(states._kept) <= num_states
    assert all(close_distributions(*pair, 1e-5) for pair in zip(found, expected, strict=True))


def test_a_failed_step_leaves_states_as_they_were(
    recurrent: tuple[TorchEngine, StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, states = recurrent
    handles = [engine.open(), engine.open()]
    engine.run([Row(handle, (1, 2, 3)) for handle in handles])
    before = dict(states._kept), sorted(states._free)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(engine_module, "to_host", lambda words: 1 / 0)  # after all layers have written
        engine.run([Row(handle, (4,)) for handle in handles])
    after = dict(states._kept), sorted(states._free)
    (found,) = engine.run([Row(handles[0], (5,))])

    assert before == after
    assert close_distributions(found, fresh_distribution(engine, [1, 2, 3, 5]), 1e-5)


def test_the_state_of_a_closed_handle_makes_room_first(recurrent: tuple[TorchEngine, StateStore]) -> None:
    engine, states = recurrent
    states.resize(1024, 2)
    held, closed = engine.open(), engine.open()
    engine.run([Row(held, (1, 2))])
    engine.run([Row(closed, (1, 2, 3))])
    engine.close(closed)
    engine.run([Row(engine.open(), (3,))])
    engine.run([Row(held, (3,))])

    assert states.groups[0].tokens.shape == (1, 1)
