"""Steps of fixed shape recorded as CUDA graphs: one launch instead of hundreds.

Written without a GPU at hand and run on none; tests record a step's operations on the CPU instead. If recording fails,
the engine runs steps one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from specbranch.engines.extras import extra
from specbranch.engines.torch.paged import Bucket

with extra("torch"):
    import torch

Compute = Callable[[Bucket], torch.Tensor]  # the operations of a bucket's step, from the frame to what is copied back


class Graphs:
    """One graph for each bucket that was recorded. They share their memory, as only one runs at a time."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Bucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def record(self, bucket: Bucket) -> None:
        """Record a bucket. The first run lets libraries take their memory, which a recording must not."""
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(bucket)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._compute(bucket)
        self._recorded[bucket] = graph, out

    def __call__(self, bucket: Bucket) -> torch.Tensor:
        """Run a bucket's step; the tensor is overwritten by the next one."""
        graph, out = self._recorded[bucket]
        graph.replay()
        return out
