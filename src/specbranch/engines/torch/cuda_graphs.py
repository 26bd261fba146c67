"""Fixed-shape steps with CUDA graphs and FlashInfer. No GPU has run them yet.

Tests record a step's operations on the CPU and replace FlashInfer with a stand-in that follows its documentation. If
recording fails, the engine runs steps one operation at a time. It compares its first FlashInfer step with one computed
without it, and does not use FlashInfer if that step fails or differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.torch.attention import (
    PLAIN,
    Attention,
    Bucket,
    Buckets,
    GatherAttention,
    LayerForm,
    PagedBackend,
    StaticBuffers,
)
from specbranch.engines.torch.kv_store import Batch, KVStore
from specbranch.engines.torch.model import FusedModel
from specbranch.engines.torch.step import ForwardPass, PackedTopK, to_host
from specbranch.errors import first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch

log = logging.getLogger(__name__)

_MAX_APART = 0.05  # how far the top-1 probabilities of two ways to compute a step may differ
_NOTHING = np.empty(0, dtype=np.int64)
_NO_ROWS = Batch((), _NOTHING, _NOTHING, _NOTHING, _NOTHING)
# Runs a bucket's step: from the static buffers to the tensor that is copied back.
ComputeBucket = Callable[[Bucket], torch.Tensor]
_WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends


class FixedShapeRunner:
    """Runs steps of fixed shapes: it pads a batch to its bucket and runs it, as a recorded graph if `record` is set.

    `frame` has the buffers of the steps, and `reader` computes their attention.
    """

    def __init__(self, forward: ForwardPass, frame: StaticBuffers, reader: PagedBackend, *, record: bool) -> None:
        self._forward = forward
        self._frame = frame
        self._reader = reader
        self._run: Callable[[Bucket], torch.Tensor] = self._compute
        if record:
            self._run = self._recorded(frame.buckets)

    def run(self, batch: Batch) -> PackedTopK | None:
        """Run a batch, and return the packed top-k of its outputs; return None if it is too large for fixed shapes."""
        bucket = self._frame.buckets.bucket(batch)
        if bucket is None:
            return None
        self._frame.fill(batch, bucket, self._reader)
        words: PackedTopK = to_host(self._run(bucket))[batch.outputs]
        return words

    def _compute(self, bucket: Bucket) -> torch.Tensor:
        tokens, positions, slots, lengths, pages = self._frame.parts(bucket)
        return self._forward(tokens, positions, slots, self._reader.attention(bucket, lengths, pages))

    def _recorded(self, buckets: Buckets) -> Graphs:
        graphs = Graphs(self._compute)
        for bucket in buckets:
            self._frame.fill(_NO_ROWS, bucket, self._reader)
            graphs.record(bucket)
        return graphs


def choose_step_runner(
    forward: ForwardPass, buckets: Buckets, probe: Callable[[FixedShapeRunner | None], Sequence[Distribution]]
) -> FixedShapeRunner | None:
    """Try the runners of fixed-shape steps, fastest first, on this device; return the first that works.

    A runner works if its results agree with those of steps of variable shapes. Returns None if no runner works; then
    all steps must have variable shapes. Logs the choice and each rejected runner. `probe` runs a step with a runner or,
    given None, with variable shapes, and returns its distributions.
    """
    expected = [float(one.confidence) for one in probe(None)]
    for name, make in _candidates(forward, buckets):
        try:
            with torch.inference_mode():
                steps = make()
            found = [float(one.confidence) for one in probe(steps)]
        except Exception as error:  # kernels and libraries that may not suit this device
            log.warning("the draft's steps are not run with %s: %s", name, first_line(error))
            continue
        if np.allclose(found, expected, rtol=0, atol=_MAX_APART):
            log.info("the draft's steps are run with %s", name)
            return steps
        log.warning("the draft's steps are not run with %s: they differ from those without", name)
    return None


def _candidates(forward: ForwardPass, buckets: Buckets) -> Iterator[tuple[str, Callable[[], FixedShapeRunner]]]:
    """Yield the possible runners of fixed-shape steps, fastest first: a name and a function that creates the runner."""
    arena, model = forward.arena, forward.model
    frame = StaticBuffers(buckets, arena.scratch, arena.device)
    gathered = GatherAttention(buckets.contexts[-1], arena.device, arena.dtype)

    def by_flashinfer() -> FixedShapeRunner:
        reader = FlashInfer(buckets, arena, model.num_heads, model.scaling)
        return FixedShapeRunner(forward, frame, reader, record=True)

    if arena.device.startswith("cuda"):
        if isinstance(model, FusedModel) and find_spec("flashinfer") is not None:
            yield "FlashInfer and CUDA graphs", by_flashinfer
        yield "CUDA graphs", lambda: FixedShapeRunner(forward, frame, gathered, record=True)
    yield "fixed shapes", lambda: FixedShapeRunner(forward, frame, gathered, record=False)


class Graphs:
    """The recorded CUDA graphs, one per bucket. They share one memory pool, because only one runs at a time."""

    def __init__(self, compute: ComputeBucket) -> None:
        self._compute = compute
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Bucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def record(self, bucket: Bucket) -> None:
        """Record the graph of a bucket's step.

        The step runs once before, so that libraries allocate their memory, which they must not do while recording.
        """
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(bucket)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._compute(bucket)
        self._recorded[bucket] = graph, out

    def __call__(self, bucket: Bucket) -> torch.Tensor:
        """Run a bucket's step and return its output tensor, which the next run overwrites."""
        graph, out = self._recorded[bucket]
        graph.replay()
        return out


class FlashInfer:
    """A paged backend on FlashInfer's decode kernels, with pages of one slot.

    Each number of rows needs a FlashInfer wrapper of its own, because a graph fixes the buffers of the wrapper.
    """

    def __init__(self, buckets: Buckets, arena: KVStore, num_heads: int, scaling: float) -> None:
        """Allocate the wrappers and their buffers.

        `num_heads` counts query heads, `scaling` multiplies attention scores. The arena must store the heads of each
        slot next to each other.
        """
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._arena, self._num_heads, self._scaling = arena, num_heads, scaling
        workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=arena.device)
        indices = torch.zeros(buckets.rows[-1] * buckets.contexts[-1], dtype=torch.int32, device=arena.device)
        self._wrappers: dict[int, Any] = {
            num_rows: BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,  # the other kernels support few ratios of query heads to key heads
                paged_kv_indptr_buffer=torch.zeros(num_rows + 1, dtype=torch.int32, device=arena.device),
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=torch.ones(num_rows, dtype=torch.int32, device=arena.device),
            )
            for num_rows in buckets.rows
        }

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        is_seen = np.arange(bucket.context) < lengths[:, None]
        self._wrappers[bucket.num_rows].plan(
            torch.from_numpy(ends),
            torch.from_numpy(pages[is_seen].astype(np.int32)),
            torch.ones(bucket.num_rows, dtype=torch.int32),
            self._num_heads,
            self._arena.num_key_heads,
            self._arena.head_dim,
            1,  # slots per page
            q_data_type=self._arena.dtype,
            kv_data_type=self._arena.dtype,
            sm_scale=self._scaling,
        )

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        wrapper, num_keys = self._wrappers[bucket.num_rows], self._arena.num_key_heads

        def attend(store: torch.Tensor, query: torch.Tensor, scaling: float, form: LayerForm = PLAIN) -> torch.Tensor:
            out = wrapper.run(query.contiguous(), store.view(len(store), 2, 1, num_keys, -1))
            found: torch.Tensor = out.view(len(query), num_keys, -1, query.shape[2])
            return found

        return attend
