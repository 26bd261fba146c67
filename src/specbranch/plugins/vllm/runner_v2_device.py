"""What Model Runner V2 keeps on its device: texts, draft logits and copies. Its CUDA half has not run on a GPU.

V2 divides these logits by the request's temperature, and verifies the draft tokens of sampled rows by them. A place
whose token was not sampled has all weight on that token. V2 reads the rows of a slot until its next drafts are written.

The form for CUDA has not been run: it was written by reading, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specbranch.core.distribution import MAX_IDS, Distribution, RequestSampling
from specbranch.plugins.vllm.compat import Array

MAX_BYTES = 256 << 20  # of logits that are kept for a runner
WIDTH = 2 * MAX_IDS  # numbers for a place: ids, and the bits of their logits
_OWN = -1  # in place of ids: the token that the place has, whichever it is


class HostTokens:
    """The tokens of every request, by its slot in the runner's states.

    `whole` reads a text from the device: from this slot, of this length. It is called for a request that is new, and
    wherever a step was missed.
    """

    def __init__(self, num_slots: int, max_len: int, whole: Callable[[int, int], Array]) -> None:
        self._table = np.zeros((num_slots, max_len), dtype=np.int32)  # takes memory where tokens are written
        self._lens = [0] * num_slots
        self._names = [""] * num_slots
        self._whole = whole

    def extend(self, slot: int, name: str, length: int, before: int, new: Array) -> Array:
        """Add `new` to a request's text, which follows the token `before`; return all of it, now of this length."""
        text = self._table[slot, :length]
        border = length - len(new)
        is_known = self._names[slot] == name and self._lens[slot] == border > 0 and text[border - 1] == before
        if is_known:
            text[border:] = new
        else:
            text[:] = self._whole(slot, length)
        self._names[slot], self._lens[slot] = name, length
        return text


class DraftLogits:
    """Rows over the vocabulary for every place of every slot. It takes its memory before vLLM measures what is left.

    Nothing waits for the device here.
    """

    def __init__(self, num_slots: int, num_places: int, vocab_len: int, device: Any) -> None:
        import torch

        self.values = torch.full((num_slots, num_places, vocab_len), -torch.inf, device=device)
        self._never = torch.tensor(-torch.inf, device=device)  # a number of the host would make the device wait
        self._written = torch.zeros((num_slots, num_places, MAX_IDS), dtype=torch.int64, device=device)
        self._places = torch.arange(num_places, device=device)[None, :, None]

    def write(self, slots: Any, drafts: Any, packed: Any) -> None:
        """Write the drafts of these slots # [rows, places] with their distributions, as `pack` makes them."""
        import torch

        ids = packed[..., :MAX_IDS]
        ids = torch.where(ids == _OWN, drafts[..., None], ids)
        logits = packed[..., MAX_IDS:].to(torch.int32).view(torch.float32)
        slots = slots.to(torch.int64)
        rows = slots[:, None, None]
        self.values[rows, self._places, self._written[slots]] = self._never
        self.values[rows, self._places, ids] = logits
        self._written[slots] = ids

    def write_certain(self, slots: Any, drafts: Any) -> None:
        """Write the drafts of these slots # [rows, places], none of them sampled; a negative token is none."""
        import torch

        packed = torch.zeros((*drafts.shape, WIDTH), dtype=torch.int64, device=drafts.device)
        packed[..., :MAX_IDS] = _OWN
        self.write(slots, drafts.clamp(min=0), packed)


def has_room(num_slots: int, num_places: int, vocab_len: int) -> bool:
    """Return whether the rows of all places fit into the memory that we may take."""
    return 4 * num_slots * num_places * vocab_len <= MAX_BYTES


def pack(
    answer: Array, samplings: Mapping[int, RequestSampling], sampled_from: Mapping[int, Sequence[Distribution | None]]
) -> Array:
    """Pack drafts # [rows, places] with their distributions # [rows, places, 1 + WIDTH], for all ranks.

    `samplings` and `sampled_from` are those of rows by their index.
    """
    packed = np.zeros((*answer.shape, 1 + WIDTH), dtype=np.int64)
    packed[..., 0] = answer
    packed[..., 1 : 1 + MAX_IDS] = _OWN  # with a logit of 0
    drawn = [
        (row, place, q)
        for row, distributions in sampled_from.items()
        for place, q in enumerate(distributions)
        if q is not None and len(q.ids) <= MAX_IDS  # else certain, which is exact for any token
    ]
    if not drawn:
        return packed
    # The first id fills the rest: writing it again changes nothing.
    ids = np.array([q.ids + q.ids[:1] * (MAX_IDS - len(q.ids)) for _, _, q in drawn])
    probs = np.array([q.probs + q.probs[:1] * (MAX_IDS - len(q.probs)) for _, _, q in drawn])
    totals = np.array([sum(q.probs) for _, _, q in drawn])
    temperatures = np.array([samplings[row].temperature for row, _, _ in drawn])
    logits = (temperatures[:, None] * np.log(probs / totals[:, None])).astype(np.float32)
    rows, places = (np.array([one[index] for one in drawn]) for index in (0, 1))
    packed[rows, places, 1 : 1 + MAX_IDS] = ids
    packed[rows, places, 1 + MAX_IDS :] = logits.view(np.int32)
    return packed


class DeviceCopier(Protocol):
    """A way to the device and back. One caller at a time."""

    def fetch(self, values: Any) -> Array:
        """Wait until the device has these int32 values, and copy them to the host."""
        ...

    def send(self, values: Array) -> Any:
        """Copy these int64 values to a tensor on the device, to which the next call may write."""
        ...


class HostCopier:
    """Copies that block. On the CPU all tensors are in host memory, so there is nothing to wait for."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def fetch(self, values: Any) -> Array:
        return np.array(values.cpu().numpy())

    def send(self, values: Array) -> Any:
        import torch

        return torch.from_numpy(values).to(self._device)


class CudaCopier:
    """Pinned memory, a stream of its own and one event.

    The worker's thread sleeps on the event, so it holds neither the interpreter nor a core while the device samples.
    No buffer is written too early: both ways begin after all that the runner's stream has to do, which includes the use
    of the last drafts.
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


def copier_for(device: Any, max_fetched: int, max_sent: int) -> DeviceCopier:
    """Make the copier for a device; the bounds are in values per call."""
    return CudaCopier(device, max_fetched, max_sent) if device.type == "cuda" else HostCopier(device)
