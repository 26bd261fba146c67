"""Copies between the device of V2's runner and the host: the only code that differs by device.

The form for CUDA has not been run: it was written by reading, on a machine without a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from specbranch.plugins.vllm.v2.texts import Array


class Link(Protocol):
    """A way to the device and back. One caller at a time."""

    def fetch(self, values: Any) -> Array:
        """Wait until the device has these int32 values, and copy them to the host."""
        ...

    def send(self, values: Array) -> Any:
        """A tensor on the device with these int64 values; the next call may write to it."""
        ...


class PlainLink:
    """Copies that are waited for. On the CPU all tensors are in host memory, and nothing is ever under way."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def fetch(self, values: Any) -> Array:
        return np.array(values.cpu().numpy())

    def send(self, values: Array) -> Any:
        import torch

        return torch.from_numpy(values).to(self._device)


class CudaLink:
    """Pinned memory, a stream of its own and one event.

    The worker's thread sleeps on the event, so it holds neither the interpreter nor a core while the device samples.
    No buffer is written too early: both ways begin behind all that the runner's stream has to do, the use of the last
    answer included.
    """

    def __init__(self, device: Any, max_fetched: int, max_sent: int) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event(blocking=True)
        self._fetched = torch.empty(max_fetched, dtype=torch.int32, pin_memory=True)
        self._sent = torch.empty(max_sent, dtype=torch.int64, pin_memory=True)
        self._arrived = torch.empty(max_sent, dtype=torch.int64, device=device)

    def fetch(self, values: Any) -> Array:
        import torch

        host = self._fetched[: values.numel()]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(values.reshape(-1), non_blocking=True)
            values.record_stream(self._stream)
            self._event.record(self._stream)
        self._event.synchronize()
        return np.array(host.numpy().reshape(values.shape))

    def send(self, values: Array) -> Any:
        import torch

        main = torch.cuda.current_stream(self._device)
        host, arrived = self._sent[: values.size], self._arrived[: values.size]
        self._event.synchronize()  # the last copy out of this memory
        host.copy_(torch.from_numpy(values.reshape(-1)))
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            arrived.copy_(host, non_blocking=True)
            self._event.record(self._stream)
        main.wait_event(self._event)
        return arrived.reshape(values.shape)


def link_to(device: Any, max_fetched: int, max_sent: int) -> Link:
    """The link to a device; the bounds are in values per call."""
    return CudaLink(device, max_fetched, max_sent) if device.type == "cuda" else PlainLink(device)
