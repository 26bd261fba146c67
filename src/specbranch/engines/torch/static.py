"""Steps of fixed shapes, run in the fastest way that works on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import numpy as np

from specbranch.core.distribution import Distribution
from specbranch.engines.extras import extra
from specbranch.engines.torch.answer import Words, to_host
from specbranch.engines.torch.batch import Batch
from specbranch.engines.torch.flashinfer import FlashInfer
from specbranch.engines.torch.forward import Forward
from specbranch.engines.torch.fused import FusedModel
from specbranch.engines.torch.graph import Graphs
from specbranch.engines.torch.paged import Bucket, Buckets, Frame, Gathered, Reader
from specbranch.engines.torch.support import first_line

with extra("torch"):
    import torch

log = logging.getLogger(__name__)

_MOST_APART = 0.05  # probabilities of first choices that two ways to compute a step may differ by
_NOTHING = np.empty(0, dtype=np.int64)
_NO_ROWS = Batch((), _NOTHING, _NOTHING, _NOTHING, _NOTHING)


class StaticSteps:
    """Fills a batch up to its bucket and runs that, as a recorded graph if asked for."""

    def __init__(self, forward: Forward, frame: Frame, reader: Reader, *, record: bool) -> None:
        self._forward = forward
        self._frame = frame
        self._reader = reader
        self._run: Callable[[Bucket], torch.Tensor] = self._compute
        if record:
            self._run = self._recorded(frame.buckets)

    def run(self, batch: Batch) -> Words | None:
        """The words of a batch's outputs; None if it is too large for fixed shapes."""
        bucket = self._frame.buckets.bucket(batch)
        if bucket is None:
            return None
        self._frame.fill(batch, bucket, self._reader)
        words: Words = to_host(self._run(bucket))[batch.outputs]
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


def fastest_steps(
    forward: Forward, buckets: Buckets, probe: Callable[[StaticSteps | None], Sequence[Distribution]]
) -> StaticSteps | None:
    """The first way that works and gives what steps without fixed shapes give; None if there is none.

    `probe` runs a step, with the given steps of fixed shape or without.
    """
    expected = [float(one.confidence) for one in probe(None)]
    for name, make in _ways(forward, buckets):
        try:
            with torch.inference_mode():
                steps = make()
            found = [float(one.confidence) for one in probe(steps)]
        except Exception as error:  # of kernels and libraries that may not suit this device
            log.warning("the draft's steps are not run with %s: %s", name, first_line(error))
            continue
        if np.allclose(found, expected, rtol=0, atol=_MOST_APART):
            log.info("the draft's steps are run with %s", name)
            return steps
        log.warning("the draft's steps are not run with %s: they differ from those without", name)
    return None


def _ways(forward: Forward, buckets: Buckets) -> Iterator[tuple[str, Callable[[], StaticSteps]]]:
    """Ways to run steps of fixed shape, fastest first."""
    arena, model = forward.arena, forward.model
    frame = Frame(buckets, arena.scratch, arena.device)
    gathered = Gathered(buckets.contexts[-1], arena.device, arena.dtype)

    def by_flashinfer() -> StaticSteps:
        reader = FlashInfer(buckets, arena, model.num_heads, model.scaling)
        return StaticSteps(forward, frame, reader, record=True)

    if arena.device.startswith("cuda"):
        if isinstance(model, FusedModel) and find_spec("flashinfer") is not None:
            yield "FlashInfer and CUDA graphs", by_flashinfer
        yield "CUDA graphs", lambda: StaticSteps(forward, frame, gathered, record=True)
    yield "fixed shapes", lambda: StaticSteps(forward, frame, gathered, record=False)
