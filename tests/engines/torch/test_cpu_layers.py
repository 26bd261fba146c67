"""Layers that Numba compiles compute what torch's operations compute, up to the rounding of floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")
transformers = pytest.importorskip("transformers", reason="the torch engine needs transformers")
pytest.importorskip("numba", reason="the functions need Numba")

from specbranch.core.distribution import Distribution
from specbranch.engines.base import EngineOptions, Row
from specbranch.engines.torch import TorchEngine, cpu_layers
from specbranch.engines.torch.attention import SpanAttention
from specbranch.engines.torch.kv_store import Batch, RowSpan
from specbranch.engines.torch.linear import max_kernel_rows
from tests.engines.closeness import close_distributions

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
Save = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Write a tiny model of random but fixed weights, and say where."""

    def save_tiny(name: str, **more: Any) -> str:
        sizes = {"vocab_size": 64, "num_hidden_layers": 2, "initializer_range": 0.1, "head_dim": 64}
        config = transformers.AutoConfig.for_model(name, **SIZES | sizes | more)
        with torch.random.fork_rng(), torch.inference_mode(mode=False):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        path: Path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        return str(path)

    return save_tiny


def _batch(paths: list[list[int]], counts: list[int]) -> Batch:
    stops = np.cumsum(counts)
    session: Any = object()
    pieces = [
        RowSpan(session, int(stop) - count, int(stop), np.array(path))
        for path, count, stop in zip(paths, counts, stops, strict=True)
    ]
    positions = np.concatenate([np.arange(len(path))[-count:] for path, count in zip(paths, counts, strict=True)])
    slots = np.concatenate([path[-count:] for path, count in zip(paths, counts, strict=True)])
    return Batch(pieces, np.zeros_like(slots), positions, slots, np.arange(len(slots)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (2, 2), (6, 3), (14, 2), (13, 1)])
def test_attention_is_torchs(num_queries: int, num_keys: int, head_dim: int) -> None:
    """Branches share a prefix, one has several new tokens, and slots lie in any order."""
    rng = np.random.default_rng(0)
    order = [int(slot) for slot in rng.permutation(40)]
    attention = SpanAttention(_batch([order[:9], [*order[:5], *order[20:24]], [30]], [1, 3, 1]), "cpu")
    store = rng.standard_normal((2 * num_keys, 41, head_dim)).astype(np.float32)
    heads = rng.standard_normal((5, num_queries + 2 * num_keys, head_dim)).astype(np.float32)

    found = cpu_layers._attend_compiled(attention, heads, store)

    np.testing.assert_allclose(found, cpu_layers._attend_by_torch(attention, heads, store), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [1, 300, -300])
def test_attention_bears_large_scores(factor: float) -> None:
    attention = SpanAttention(_batch([[3, 1, 0, 2]], [1]), "cpu")
    store = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    heads = np.concatenate((np.full((1, 1, 64), factor), np.ones((1, 2, 64))), axis=1).astype(np.float32)

    found = cpu_layers._attend_compiled(attention, heads, store)

    np.testing.assert_allclose(found, cpu_layers._attend_by_torch(attention, heads, store), rtol=1e-4, atol=1e-5)


def test_exponentials_are_exact_to_the_last_bits() -> None:
    gates = np.linspace(-80, 80, 4000, dtype=np.float32)
    rows = np.concatenate((gates, np.ones_like(gates)))[None]
    codes, scales = np.empty((1, len(gates)), np.int16), np.empty(1, np.float32)

    cpu_layers._gate_and_quantize(rows, 32767, codes, scales)

    wanted = torch.nn.functional.silu(torch.from_numpy(gates)).numpy()
    np.testing.assert_allclose(codes[0] * scales[0], wanted, rtol=1e-6, atol=0.51 * scales[0])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_are_those_of_torchs_operations(
    name: str, threads: int, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of a prefix, of forks of it, and of branches, in steps of one row and of many."""
    if max_kernel_rows() == 0:
        pytest.skip("our own product does not serve this CPU")
    before = torch.get_num_threads()
    engine = TorchEngine(EngineOptions(save(name), dtype="int8", threads=threads, top_k=64, max_tokens=512))
    try:
        calls = _count_calls(monkeypatch)
        found = _history(engine)
        assert len(calls) == 5
        monkeypatch.setattr(cpu_layers.CompiledLayers, "can_run", lambda *_: False)
        wanted = _history(engine)
        assert len(calls) == 5
    finally:
        torch.set_num_threads(before)
    assert len(found) == len(wanted)
    assert all(close_distributions(one, other, 0.004) for one, other in zip(found, wanted, strict=True))


def test_a_row_does_not_depend_on_the_other_rows(save: Save) -> None:
    engine = TorchEngine(EngineOptions(save("qwen3"), dtype="int8", top_k=64, max_tokens=512))
    trunk = engine.open()
    engine.run([Row(trunk, tuple(range(9)))])
    handles = [engine.fork(trunk, 9 - index) for index in range(5)]
    rows = [Row(handle, (index, 7)) for index, handle in enumerate(handles)]
    together = engine.run(rows)
    for index, handle in enumerate(handles):
        engine.truncate(handle, 9 - index)

    assert [engine.run([row])[0] for row in rows] == together


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of each step that compiled layers run."""
    calls: list[int] = []
    whole = cpu_layers.CompiledLayers.__call__

    def counted(layers: Any, rows: Any, *more: Any) -> Any:
        calls.append(len(rows))
        return whole(layers, rows, *more)

    monkeypatch.setattr(cpu_layers.CompiledLayers, "__call__", counted)
    return calls


def _history(engine: TorchEngine) -> list[Distribution]:
    """Run steps of 12, 40, 1, 5, 10 and 10 tokens; the second is too long for compiled layers."""
    first, second = engine.open(), engine.open()
    found = engine.run([Row(first, tuple(range(12)), num_outputs=12)])
    found += engine.run([Row(second, tuple(range(40)))])
    found += engine.run([Row(first, (5,))])
    forks = [engine.fork(first, 13 - 2 * index) for index in range(5)]
    found += engine.run([Row(fork, (index,)) for index, fork in enumerate(forks)])
    for _ in range(2):
        found += engine.run([Row(handle, (9, 3), num_outputs=2) for handle in [second, *forks[:4]]])
    for handle in (first, second, *forks):
        engine.close(handle)
    return found
