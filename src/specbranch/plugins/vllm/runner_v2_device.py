"""Token sequences and draft logits of Model Runner V2, and copies between host and device.

V2 divides draft logits by the request's temperature, and verifies the draft tokens of sampled rows by them. At a
position whose token was not sampled, that token has probability 1. A slot is a request's index in the runner's states;
V2 reads the logits of a slot until the logits of its next draft are written.

The code for CUDA has not been run, because it was written on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specbranch.core.distribution import MAX_IDS, Distribution, RequestSampling
from specbranch.plugins.vllm.compat import Array

MAX_BYTES = 256 << 20  # of logits that are kept for a runner
WIDTH = 2 * MAX_IDS  # numbers for a position: ids, and the bits of their logits
_OWN = -1  # instead of an id: the draft token at the position itself


class HostTokens:
    """Keeps the tokens of every request in host memory, by the request's slot in the runner's states.

    `whole(slot, length)` reads all tokens of a sequence from the device. It is called for a new request, and for one
    whose stored tokens lack those of an earlier step.
    """

    def __init__(self, num_slots: int, max_len: int, whole: Callable[[int, int], Array]) -> None:
        self._table = np.zeros((num_slots, max_len), dtype=np.int32)  # takes memory where tokens are written
        self._lens = [0] * num_slots
        self._names = [""] * num_slots
        self._whole = whole

    def extend(self, slot: int, name: str, length: int, before: int, new: Array) -> Array:
        """Append the tokens `new` to the stored sequence of request `name`; return all its `length` tokens.

        `before` is the token before `new`. If the stored sequence has another length or does not end with it, read the
        whole sequence from the device.
        """
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
    """The draft logits on the device, `values` [slots, draft positions, vocabulary].

    All memory is allocated at creation, before vLLM measures how much is left. No method makes the host wait for the
    device.
    """

    def __init__(self, num_slots: int, num_places: int, vocab_len: int, device: Any) -> None:
        import torch

        self.values = torch.full((num_slots, num_places, vocab_len), -torch.inf, device=device)
        self._never = torch.tensor(-torch.inf, device=device)  # a number of the host would make the device wait
        self._written = torch.zeros((num_slots, num_places, MAX_IDS), dtype=torch.int64, device=device)
        self._places = torch.arange(num_places, device=device)[None, :, None]

    def write(self, slots: Any, drafts: Any, packed: Any) -> None:
        """Replace the logits of these slots by those of the tokens `drafts` [rows, positions].

        `packed` [rows, positions, WIDTH] has their distributions: the result of `pack` without the tokens themselves.
        """
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
        """Give the tokens of `drafts` [rows, positions] probability 1 in the logits of these slots.

        A negative token marks a position without a draft token, and is treated as token 0.
        """
        import torch

        packed = torch.zeros((*drafts.shape, WIDTH), dtype=torch.int64, device=drafts.device)
        packed[..., :MAX_IDS] = _OWN
        self.write(slots, drafts.clamp(min=0), packed)


def has_room(num_slots: int, num_places: int, vocab_len: int) -> bool:
    """Return whether the draft logits of all slots and positions fit into `MAX_BYTES`."""
    return 4 * num_slots * num_places * vocab_len <= MAX_BYTES


def pack(
    answer: Array, samplings: Mapping[int, RequestSampling], sampled_from: Mapping[int, Sequence[Distribution | None]]
) -> Array:
    """Return the drafts `answer` [rows, positions] and their distributions as one array [rows, positions, 1 + WIDTH].

    Both mappings are by row index: `samplings` has the sampling parameters of rows, and `sampled_from` the distribution
    that each draft token was sampled from, None if it was not sampled.
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
    """Interface of a copier between host and device. One thread at a time may call it."""

    def fetch(self, values: Any) -> Array:
        """Wait until the device has computed these int32 values, and return a copy of them in host memory."""
        ...

    def send(self, values: Array) -> Any:
        """Copy these int64 values to the device, and return them as a tensor that the next call may overwrite."""
        ...


class HostCopier:
    """A copier for devices other than CUDA, above all the CPU: each copy is complete when the call returns."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def fetch(self, values: Any) -> Array:
        return np.array(values.cpu().numpy())

    def send(self, values: Array) -> Any:
        import torch

        return torch.from_numpy(values).to(self._device)


class CudaCopier:
    """A copier for CUDA, with pinned memory, a stream of its own and one event.

    The worker's thread sleeps on the event, so it holds neither the interpreter nor a core while the device samples.
    No buffer is written too early: copies in both directions begin after all work on the runner's stream, which
    includes the use of the last drafts.
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
    """Return the copier for a device; one call copies at most `max_fetched` or `max_sent` values."""
    return CudaCopier(device, max_fetched, max_sent) if device.type == "cuda" else HostCopier(device)
