"""Steps of fixed shapes, on the CPU: right with every bucket, few operations, one small copy, and memory that stays.

CUDA graphs and FlashInfer need a GPU. In their place are a recorder of ATen's calls, which runs the same calls on the
same memory again, and a wrapper that does in plain operations what FlashInfer's documentation says.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

torch = pytest.importorskip("torch", reason="the torch engine needs torch")
transformers = pytest.importorskip("transformers", reason="the torch engine needs transformers")

from torch.utils._python_dispatch import TorchDispatchMode

from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.torch import TorchEngine, cuda_graphs, engine, step
from specbranch.engines.torch.attention import Bucket, Buckets, GatherAttention, StaticBuffers
from specbranch.engines.torch.cuda_graphs import FlashInfer, Graphs
from specbranch.engines.torch.linear import can_int8
from specbranch.errors import EngineFull
from tests.engines.closeness import close_distributions
from tests.engines.conformance import STATEFUL, Close, EngineConformance, fresh_distribution, machine_for

SMALL = Buckets(rows=(1, 4, 8), contexts=(8, 64))  # most steps of the tests are filled up, some are too large
MAX_OPERATIONS = 350  # of a step of 24 layers
VOCAB, TOP_K = 4096, 32

Save = Callable[..., str]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Write a tiny model of random but fixed weights, and say where."""

    def save_tiny(name: str, **more: Any) -> str:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"vocab_size": 64, "num_hidden_layers": 2}
        config = transformers.AutoConfig.for_model(name, initializer_range=0.3, **sizes | more)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        return str(path)

    return save_tiny


@pytest.fixture(scope="module")
def llama(save: Save) -> TorchEngine:
    return TorchEngine(EngineOptions(save("llama"), dtype="float32", max_tokens=2000), SMALL)


@pytest.fixture(scope="module")
def llama_int8(save: Save) -> TorchEngine:
    if not can_int8():
        pytest.skip("this build of torch has no int8 kernels")
    return TorchEngine(EngineOptions(save("llama"), dtype="w8a16", max_tokens=2000), SMALL)


@pytest.fixture(scope="module")
def olmo2(save: Save) -> TorchEngine:
    return TorchEngine(EngineOptions(save("olmo2"), dtype="float32", max_tokens=2000), SMALL)


class TestFilledUp(EngineConformance):
    @pytest.fixture
    def engine(self, llama: TorchEngine) -> DraftEngine:
        return llama

    @pytest.fixture
    def is_close(self) -> Close:
        return close_distributions


class TestFilledUpInt8(TestFilledUp):
    @pytest.fixture
    def engine(self, llama_int8: TorchEngine) -> DraftEngine:
        return llama_int8

    @pytest.fixture
    def is_close(self) -> Close:
        return lambda a, b: close_distributions(a, b, tolerance=0.02)


class TestFilledUpPlain(TestFilledUp):
    """A family that is not fused: our attention inside the model of Transformers."""

    @pytest.fixture
    def engine(self, olmo2: TorchEngine) -> DraftEngine:
        return olmo2


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the calls of ATen with the tensors that they were given and gave, to make them again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a recording cannot wait for a number"
        out = function(*args, **(kwargs or {}))
        outs = list(out) if isinstance(out, tuple | list) else [out]
        if not (function.is_view and all(_shares_memory(one, args[0]) for one in outs)):
            self._calls.append((function, args, kwargs or {}, outs))
        return out

    def replay(self) -> None:
        for function, args, kwargs, outs in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(outs, again if isinstance(again, tuple | list) else [again], strict=True):
                if old is not new:
                    old.copy_(new)


class RecordedGraphs(Graphs):
    """Graphs as CUDA's are, on the CPU."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute
        self._recorded = {}

    def record(self, bucket: Bucket) -> None:
        with Recorder() as recorder:
            out = self._compute(bucket)
        self._recorded[bucket] = recorder, out


class DocumentedWrapper:
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper` as its documentation has it, in plain operations."""

    def __init__(self, workspace: Any, kv_layout: str, **buffers: Any) -> None:
        assert kv_layout == "NHD" and buffers.pop("use_cuda_graph") and buffers.pop("use_tensor_cores")
        self._indptr, self._indices, self._last = (buffers.pop(f"paged_kv_{name}_buffer") for name in BUFFERS)
        assert not buffers and len(self._last) == len(self._indptr) - 1

    def plan(
        self, indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, width: int, page_size: int, **more: Any
    ) -> None:
        assert page_size == 1 and more.keys() == {"q_data_type", "kv_data_type", "sm_scale"}
        assert {part.dtype for part in (indptr, indices, last)} == {torch.int32}
        self._shape, self._scale = (heads, kv_heads, width), more["sm_scale"]
        self._indptr.copy_(indptr)
        self._indices[: len(indices)].copy_(indices)
        self._last.copy_(last)

    def run(self, q: Any, cache: Any) -> Any:
        heads, kv_heads, width = self._shape
        assert q.shape[1:] == (heads, width) and cache.shape[1:] == (2, 1, kv_heads, width)
        out = torch.empty_like(q)
        for row, (start, stop) in enumerate(pairwise(self._indptr.tolist())):
            keys, values = (cache[self._indices[start:stop].long(), which, 0].transpose(0, 1) for which in (0, 1))
            grouped = q[row].view(kv_heads, -1, width)
            scores = (grouped @ keys.transpose(1, 2) * self._scale).softmax(-1)
            out[row] = (scores @ values).view(heads, width)
        return out


BUFFERS = ("indptr", "indices", "last_page_len")


@pytest.fixture(scope="module")
def recorded(save: Save) -> TorchEngine:
    def ways(forward: Any, buckets: Buckets) -> Any:
        frame = StaticBuffers(buckets, forward.arena.scratch, "cpu")
        yield (
            "a recorder",
            lambda: cuda_graphs.FixedShapeRunner(
                forward, frame, GatherAttention(64, "cpu", torch.float32), record=True
            ),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "_candidates", ways)
        patch.setattr(cuda_graphs, "Graphs", RecordedGraphs)
        one = TorchEngine(EngineOptions(save("qwen2"), dtype="float32", max_tokens=2000), SMALL)
    assert one._static is not None and isinstance(one._static._run, RecordedGraphs)
    return one


@pytest.fixture(scope="module")
def documented(save: Save) -> TorchEngine:
    def ways(forward: Any, buckets: Buckets) -> Any:
        frame = StaticBuffers(buckets, forward.arena.scratch, "cpu")
        reader = FlashInfer(buckets, forward.arena, forward.model.num_heads, forward.model.scaling)
        yield "FlashInfer", lambda: cuda_graphs.FixedShapeRunner(forward, frame, reader, record=False)

    library = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = DocumentedWrapper  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "_candidates", ways)
        patch.setitem(sys.modules, "flashinfer", library)
        one = TorchEngine(EngineOptions(save("llama"), dtype="float32", max_tokens=2000), SMALL)
    assert one._static is not None
    return one


class TestRecorded(TestFilledUp):
    @pytest.fixture
    def engine(self, recorded: TorchEngine) -> DraftEngine:
        return recorded


class TestDocumented(TestFilledUp):
    @pytest.fixture
    def engine(self, documented: TorchEngine) -> DraftEngine:
        return documented


def test_random_histories_of_recorded_steps_never_give_a_wrong_distribution(recorded: TorchEngine) -> None:
    run_state_machine_as_test(machine_for(recorded, close_distributions), settings=settings(STATEFUL, max_examples=50))


def test_random_histories_never_give_a_wrong_distribution_or_leave_a_cell(llama: TorchEngine) -> None:
    run_state_machine_as_test(machine_for(llama, close_distributions), settings=STATEFUL)

    assert llama.num_tokens == 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_small_and_large_steps_say_what_the_plain_model_says(save: Save, name: str) -> None:
    path = save(name, head_dim=8)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager")
    filled = TorchEngine(EngineOptions(path, dtype="float32", max_tokens=2000), SMALL)
    tokens = [(7 * position + position * position) % 64 for position in range(90)]
    trunk = filled.open()
    found = filled.run([Row(trunk, tuple(tokens[:20]), 20)])  # too many rows
    found += filled.run([Row(trunk, tuple(tokens[20:25]), 5)])
    found += [filled.run([Row(trunk, (token,))])[0] for token in tokens[25:]]  # at last too long a context
    filled.close(trunk)

    with torch.inference_mode():
        probs = plain(torch.tensor([tokens])).logits[0].softmax(-1)
    for one, expected in zip(found, probs, strict=True):
        assert torch.allclose(torch.tensor(one.probs), expected[list(one.ids)], atol=1e-4)
        assert abs(one.entropy + float((expected * expected.log()).sum())) < 1e-3


def test_a_step_is_filled_up_to_the_next_bucket(llama: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Bucket] = []
    steps = llama._static
    assert steps is not None

    def run(bucket: Bucket) -> Any:
        used.append(bucket)
        return steps._compute(bucket)

    monkeypatch.setattr(steps, "_run", run)
    a, b = llama.open(), llama.open()
    llama.run([Row(a, (1, 2, 3))])
    llama.run([Row(a, (1,)), Row(b, (1, 2, 3, 4))])
    llama.run([Row(a, (1,) * 5)])
    llama.run([Row(a, (1,) * 9)])  # no bucket has so many rows
    llama.run([Row(a, (1,))])
    llama.close(a)
    llama.close(b)

    assert used == [Bucket(4, 8), Bucket(8, 8), Bucket(8, 64), Bucket(1, 64)]


def test_no_more_contexts_are_prepared_than_the_cache_can_hold() -> None:
    assert Buckets(contexts=(16, 64, 256)).up_to(65).contexts == (16, 64, 256)
    assert Buckets(contexts=(16, 64, 256)).up_to(64).contexts == (16, 64)
    assert Buckets(contexts=(16, 64, 256)).up_to(3).contexts == (16,)
    assert Buckets(contexts=(16, 64, 256)).up_to(9999).contexts == (16, 64, 256)


def test_a_way_that_fails_or_differs_is_left_out(
    save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ways = cuda_graphs._candidates

    def more(forward: Any, buckets: Buckets) -> Iterator[tuple[str, Callable[[], Any]]]:
        ((_, plain),) = ways(forward, buckets)

        def failing() -> Any:
            raise RuntimeError("no such kernel\nand more")

        def wrong() -> Any:
            steps: Any = plain()
            run = steps.run
            monkeypatch.setattr(steps, "run", lambda batch: run(batch)[::-1].copy())
            return steps

        yield from (("failing", failing), ("wrong", wrong), ("plain", plain))

    monkeypatch.setattr(cuda_graphs, "_candidates", more)
    options = EngineOptions(save("llama"), dtype="float32", max_tokens=100)
    with caplog.at_level("INFO", logger="specbranch.engines.torch.cuda_graphs"):
        TorchEngine(options, SMALL)

    messages = [entry.getMessage() for entry in caplog.records if entry.name == "specbranch.engines.torch.cuda_graphs"]
    assert [message.removeprefix("the draft's steps are ") for message in messages] == [
        "not run with failing: no such kernel",
        "not run with wrong: they differ from those without",
        "run with plain",
    ]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls of ATen that compute or copy; views of what is there already only cost the host its call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        parts = out if isinstance(out, tuple | list) else [out]
        is_view = function.is_view and all(_shares_memory(part, args[0]) for part in parts)
        if is_view:
            self.num_views += 1
        else:
            self.counts[str(function)] += 1
        return out

    @property
    def num_launched(self) -> int:
        return sum(self.counts.values())


def _shares_memory(one: Any, other: Any) -> bool:
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


@contextmanager
def forks(engine: TorchEngine, sessions: int, rows_of_each: int) -> Iterator[list[Row]]:
    """One-token rows behind texts of ten tokens."""
    trunks = [engine.open() for _ in range(sessions)]
    for trunk in trunks:
        engine.run([Row(trunk, tuple(range(10)))])
    handles = [engine.fork(trunk, 10) for trunk in trunks for _ in range(rows_of_each)]
    yield [Row(handle, (number,)) for number, handle in enumerate(handles)]
    for handle in (*trunks, *handles):
        engine.close(handle)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_step_is_few_operations_whatever_its_rows_and_sessions(save: Save, name: str) -> None:
    deep = TorchEngine(
        EngineOptions(save(name, num_hidden_layers=24, vocab_size=VOCAB), dtype="float32", max_tokens=2000),
        Buckets(contexts=(64,)),
    )
    found: dict[tuple[int, int], Counter[str]] = {}
    for sessions, rows_of_each in ((1, 1), (1, 16), (8, 1), (8, 2), (16, 1)):
        with forks(deep, sessions, rows_of_each) as rows, Operations() as operations:
            deep.run(rows)
        found[sessions, rows_of_each] = operations.counts
        assert operations.num_launched <= MAX_OPERATIONS, operations.counts
        assert operations.num_views <= MAX_OPERATIONS

    assert len({tuple(sorted(counts.items())) for counts in found.values()}) == 1


@pytest.mark.parametrize("buckets", [None, Buckets(contexts=(64,))])
def test_a_step_ends_with_one_copy_to_the_host_and_none_is_as_large_as_the_vocabulary(
    save: Save, buckets: Buckets | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = TorchEngine(EngineOptions(save("llama", vocab_size=VOCAB), dtype="float32", max_tokens=2000), buckets)
    sizes: list[int] = []

    def counted(words: Any) -> Any:
        sizes.append(words.numel())
        return step.to_host(words)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a second way to the host")

    with forks(deep, 8, 2) as rows, monkeypatch.context() as patch:
        for module in (engine, cuda_graphs):
            patch.setattr(module, "to_host", counted)
        for method in ("tolist", "item", "__array__"):
            patch.setattr(torch.Tensor, method, fail)
        deep.run(rows)

    assert sizes == [16 * (3 * TOP_K + 1)]
    assert sizes[0] < VOCAB


@pytest.mark.parametrize("buckets", [None, SMALL])
def test_memory_stays_as_it_is_after_the_start(save: Save, buckets: Buckets | None) -> None:
    one = TorchEngine(EngineOptions(save("llama"), dtype="float32", max_tokens=300, max_handles=16), buckets)
    order, lengths = random.Random(0), dict[int, int]()

    def change() -> None:
        choice = order.random()
        handle = order.choice(list(lengths)) if lengths else None
        if handle is None or (choice < 0.2 and len(lengths) < 16):
            lengths[one.open()] = 0
        elif choice < 0.45 and len(lengths) < 16:
            length = order.randint(0, lengths[handle])
            lengths[one.fork(handle, length)] = length
        elif choice < 0.7:
            lengths[handle] = order.randint(0, lengths[handle])
            one.truncate(handle, lengths[handle])
        elif choice < 0.9:
            one.close(handle)
            del lengths[handle]
        else:
            tokens = tuple(order.randrange(64) for _ in range(order.randint(1, 12)))
            try:
                one.run([Row(handle, tokens)])
                lengths[handle] += len(tokens)
            except EngineFull:
                one.close(handle)
                del lengths[handle]

    for _ in range(1000):  # until libraries have what they keep
        change()
    before, stores, resident = one.num_bytes, _addresses(one), _resident_bytes()
    for _ in range(10_000):
        change()

    assert (one.num_bytes, _addresses(one)) == (before, stores)
    assert before == 301 * 2 * 2 * 2 * 8 * 4  # slots, layers, keys and values, heads, width, bytes
    assert _resident_bytes() - resident < 16 << 20


def _addresses(one: TorchEngine) -> list[int]:
    return [store.data_ptr() for store in one._arena._layers.values()]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_rows_that_fill_up_a_step_leave_the_cache_alone(llama: TorchEngine) -> None:
    trunk = llama.open()
    llama.run([Row(trunk, (1, 2, 3))])
    slots = llama._cells.path(trunk)
    before = [store[slots].clone() for store in llama._arena._layers.values()]
    other = llama.open()
    llama.run([Row(other, (5, 6))])
    after = [store[slots].clone() for store in llama._arena._layers.values()]
    llama.close(other)
    (found,) = llama.run([Row(trunk, (4,))])
    llama.close(trunk)

    assert all(torch.equal(one, same) for one, same in zip(before, after, strict=True))
    assert close_distributions(found, fresh_distribution(llama, [1, 2, 3, 4]))


@pytest.mark.parametrize("vocab_len", [64, 5000, 5003, 49152])
def test_the_top_k_by_blocks_is_the_top_k(vocab_len: int) -> None:
    logits = 3 * torch.randn(5, vocab_len, generator=torch.Generator().manual_seed(0))

    plain, by_blocks = (step.pack_top_k(logits, TOP_K, by_blocks=how).numpy() for how in (False, True))
    pairs = zip(step.unpack_top_k(plain, TOP_K), step.unpack_top_k(by_blocks, TOP_K), strict=True)
    assert all(one.ids == other.ids and close_distributions(one, other, 1e-6) for one, other in pairs)
