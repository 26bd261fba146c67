"""llama.cpp as a draft engine, on real weights."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from specbranch.core.distribution import Distribution
from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.llamacpp import GgmlGpus, LlamaCppEngine, gguf_path, model_params
from specbranch.engines.registry import engine_for, open_engine, runs_on_gpu
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.errors import EngineError, EngineFull
from tests.engines.closeness import close_distributions
from tests.engines.conformance import Close, EngineConformance, fresh_distribution, machine_for
from tests.measuring import num_calls, record
from tests.models import model_path


def is_close(a: Distribution, b: Distribution) -> bool:
    """With weights and cache in 32 bits only the order of summation changes from cell to cell."""
    return close_distributions(a, b, 1e-4)


def is_roughly_close(a: Distribution, b: Distribution) -> bool:
    """With packed weights activations are rounded to 8 bits: a last digit can change one, and the result."""
    return close_distributions(a, b, 0.1)


def engine_of(path: Path, dtype: str = "auto", max_tokens: int = 1024, max_handles: int = 64) -> LlamaCppEngine:
    options = EngineOptions(str(path), threads=1, dtype=dtype, max_tokens=max_tokens, max_handles=max_handles)
    return LlamaCppEngine(options)


@pytest.fixture(scope="module")
def dense_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with its weights unpacked to 32 bits, by llama.cpp's own converter."""
    import llama_cpp

    path = tmp_path_factory.mktemp("dense") / "smollm2-f32.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    source = gguf_path(str(model_path("smollm2-135m")))
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


@pytest.fixture(scope="module")
def dense(dense_gguf: Path) -> Iterator[LlamaCppEngine]:
    engine = engine_of(dense_gguf, "float32")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LlamaCppEngine]:
    engine = engine_of(model_path("smollm2-135m"))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def qwen() -> Iterator[LlamaCppEngine]:
    engine = engine_of(model_path("qwen-coder-0.5b"))
    yield engine
    engine.shutdown()


class TestDenseSmolLM2(EngineConformance):
    @pytest.fixture
    def engine(self, dense: LlamaCppEngine) -> DraftEngine:
        return dense

    @pytest.fixture
    def is_close(self) -> Close:
        return is_close


def test_it_says_which_tokens_it_has(smollm2: LlamaCppEngine) -> None:
    """The same as the target's, which is read from other files."""
    assert smollm2.info.vocab_fingerprint == read_fingerprint(str(model_path("smollm2-135m-dense"))) != b""


class TestPackedSmolLM2(EngineConformance):
    @pytest.fixture
    def engine(self, smollm2: LlamaCppEngine) -> DraftEngine:
        return smollm2

    @pytest.fixture
    def is_close(self) -> Close:
        return is_roughly_close


class TestQwenDraft(EngineConformance):
    @pytest.fixture
    def engine(self, qwen: LlamaCppEngine) -> DraftEngine:
        return qwen

    @pytest.fixture
    def is_close(self) -> Close:
        return is_roughly_close


def test_random_histories_never_give_a_wrong_distribution_or_leave_a_cell(dense: LlamaCppEngine) -> None:
    hundreds = settings(max_examples=200, stateful_step_count=10, deadline=None)
    run_state_machine_as_test(machine_for(dense, is_close), settings=hundreds)

    assert dense.num_tokens == 0


def test_after_all_handles_are_closed_the_whole_cache_can_be_filled(dense: LlamaCppEngine) -> None:
    """llama.cpp itself has room for every token that the bookkeeping says is free."""
    handle = dense.open()
    for _ in range(1024 // 256):
        dense.run([Row(handle, tuple(range(100, 356)))])
    with pytest.raises(EngineFull, match="room for 0 more"):
        dense.run([Row(handle, (1,))])
    dense.close(handle)

    assert dense.num_tokens == 0
    assert fresh_distribution(dense, [1, 2, 3]).ids


def test_a_fork_of_a_thousand_tokens_copies_nothing_and_takes_no_cell(
    dense_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many calls as the fork of one token, and no memory."""
    engine = engine_of(dense_gguf, max_tokens=1280, max_handles=40)
    trunk = engine.open()
    engine.run([Row(trunk, tuple(100 + i % 5000 for i in range(1000)))])
    before = engine.num_tokens, _resident_bytes()
    times_s = []
    for _ in range(32):
        start_s = time.perf_counter()
        engine.fork(trunk, 1000)
        times_s.append(time.perf_counter() - start_s)
    after = engine.num_tokens, _resident_bytes()
    calls = [num_calls(partial(engine.fork, trunk, length)) for length in (1, 1000)]
    engine.shutdown()

    with capsys.disabled():
        print(f"\nfork of 1,000 tokens, llama.cpp: median {statistics.median(times_s) * 1e6:.0f} us")
    record("fork", engine="llamacpp", tokens=1000, median_us=round(statistics.median(times_s) * 1e6))
    assert calls[0] == calls[1]
    assert after[0] == before[0] == 1000
    # One copy of these 1,000 tokens would be 23 MB: 30 layers of 2 times 192 numbers of 2 bytes each.
    assert after[1] - before[1] < 8 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_llamacpp_and_torch_give_the_same_distributions_for_the_same_weights(dense: LlamaCppEngine) -> None:
    """The same GGUF, its weights unpacked to 32 bits on both sides."""
    pytest.importorskip("torch", reason="torch is not installed")
    from specbranch.engines.torch import TorchEngine

    other = TorchEngine(EngineOptions(str(model_path("smollm2-135m")), dtype="float32", threads=1))
    sequences = [[504, 2365, 6354, 16438], [28, 253, 1165, 30, 100, 2000], list(range(300, 340))]
    pairs = [(fresh_distribution(dense, sequence), fresh_distribution(other, sequence)) for sequence in sequences]
    other.shutdown()

    assert all(close_distributions(a, b, 1e-3) for a, b in pairs)


def test_a_missing_or_broken_model_is_refused_with_advice(tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.gguf", tmp_path / "empty"
    broken.write_bytes(b"not a model")
    empty.mkdir()

    with pytest.raises(EngineError, match="could not be loaded"):
        LlamaCppEngine(EngineOptions(str(broken)))
    with pytest.raises(EngineError, match="give a path"):
        gguf_path("nowhere")
    with pytest.raises(EngineError, match="holds 0 GGUF files"):
        gguf_path(str(empty))
    for device in ("abacus", "gpu:x"):
        with pytest.raises(EngineError, match="no device is called"):
            LlamaCppEngine(EngineOptions(str(broken), device=device))
    with pytest.raises(EngineError, match="no engine is called"):
        open_engine("abacus", EngineOptions("x"))
    with pytest.raises(EngineError, match="max_tokens is 0"):
        EngineOptions("x", max_tokens=0)
    with pytest.raises(EngineError, match="threads is 0"):
        EngineOptions("x", threads=0)
    assert engine_for("x.gguf") == "llamacpp"
    assert engine_for("org/model") == "torch"


def test_a_recurrent_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recurrent weights are at hand; llama.cpp's own answer is replaced."""
    monkeypatch.setattr("specbranch.engines.llamacpp.llama_cpp.llama_model_is_recurrent", lambda model: True)

    with pytest.raises(EngineError, match="cannot be truncated"):
        engine_of(model_path("smollm2-135m"))


def test_a_gpu_is_refused_by_a_build_without_gpus_before_anything_is_loaded() -> None:
    import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this llama.cpp was built with GPUs")
    for device in ("cuda:0", "gpu:1", "metal"):
        with pytest.raises(EngineError, match=f"on {device}: .*GGML_CUDA=on.* torch engine, or give cpu"):
            LlamaCppEngine(EngineOptions("no such model", device=device))
    assert not runs_on_gpu("llamacpp")
    assert runs_on_gpu("torch")


def test_a_model_is_loaded_on_one_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is at hand; what llama.cpp says of itself is replaced."""
    import llama_cpp

    monkeypatch.setattr("specbranch.engines.llamacpp.llama_cpp.llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr("specbranch.engines.llamacpp._gpus", lambda: GgmlGpus(FakeGgml()))
    params = model_params("gpu:1")

    assert (params.split_mode, params.main_gpu) == (llama_cpp.LLAMA_SPLIT_MODE_NONE, 1)
    assert params.n_gpu_layers < 0, "all layers"
    assert model_params("cpu").n_gpu_layers == 0
    with pytest.raises(EngineError, match=r"there is no gpu:2: llama\.cpp sees 2 GPUs"):
        model_params("gpu:2")


def test_the_free_memory_of_a_gpu_is_asked_of_ggml() -> None:
    gpus = GgmlGpus(FakeGgml())

    assert gpus.count == 2
    assert [gpus.free_bytes(index) for index in range(3)] == [11_000, 13_000, None]
    assert GgmlGpus(object()).count == 0, "a library without these functions"


def test_the_real_library_has_these_functions() -> None:
    """It would be no error if it had not: the memory of GPUs would be unknown."""
    import llama_cpp

    library = llama_cpp.llama_cpp._lib
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert GgmlGpus(library).count == 0 or llama_cpp.llama_supports_gpu_offload()
    first = ctypes.c_void_p(library.ggml_backend_dev_get(ctypes.c_size_t(0)))
    library.ggml_backend_dev_memory(first, ctypes.byref(free), ctypes.byref(total))

    assert 0 < free.value <= total.value


DEVICES = {100: (0, 5_000), 101: (1, 11_000), 102: (1, 13_000)}  # by address: kind, free memory


class FakeGgml:
    """A CPU and two GPUs, as ggml tells of them."""

    def __init__(self) -> None:
        self.ggml_backend_dev_count = self._function(lambda: len(DEVICES))
        self.ggml_backend_dev_get = self._function(lambda number: list(DEVICES)[number.value])
        self.ggml_backend_dev_type = self._function(lambda device: DEVICES[device.value][0])
        self.ggml_backend_dev_memory = self._function(self._tell_memory)

    def _tell_memory(self, device: ctypes.c_void_p, free: Any, total: Any) -> None:
        assert device.value is not None
        free._obj.value = DEVICES[device.value][1]
        total._obj.value = 20_000

    def _function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: call(*arguments)  # a Python function takes attributes, as one of ctypes does


def test_a_cache_of_no_given_size_takes_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # 30 layers of 2 times 3 heads of 64 numbers in 2 bytes, and 128 scores of 9 heads in 4 bytes.
    per_token = 30 * 2 * 3 * 64 * 2 + 128 * 9 * 4
    monkeypatch.setattr("specbranch.engines.llamacpp.free_host_memory", lambda: 400_000 * per_token)
    with caplog.at_level("INFO"):
        engine = LlamaCppEngine(EngineOptions(str(model_path("smollm2-135m")), threads=1))
    engine.shutdown()

    assert engine.info.max_tokens == 40_000 // 256 * 256
    assert "the draft's KV cache: 39,936 tokens, 1.1 GB: from 11.1 GB of free memory" in caplog.text
