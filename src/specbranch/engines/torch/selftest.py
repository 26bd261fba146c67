"""Compare a model on our attention and our cache with its own plain forward pass, at every start.

Four short sequences, one of them a branch of another, run in two steps. A model that was wired wrongly is refused with
the difference; it would only cost speed, but nobody would know why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import SlotAllocator
from specbranch.engines.torch.attention import SpanAttention
from specbranch.engines.torch.kv_store import KVStore, step_batch
from specbranch.engines.torch.plain import UnsupportedModel, unsupported
from specbranch.engines.torch.step import ForwardPass
from specbranch.errors import EngineError, first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch

_FIRST, _SECOND = (5, 2, 5), (1, 1, 3)  # tokens of each sequence in the two steps
_LENGTHS = tuple(map(sum, zip(_FIRST, _SECOND, strict=True)))
_BRANCH_AT, _BRANCH_LEN = 4, 2  # the branch leaves the first sequence here, with so many tokens of its own
NUM_SLOTS = sum(_LENGTHS) + _BRANCH_LEN  # of a cache that the test needs
# Distance in probability up to which a distribution counts as the same, by dtype. Integers of 8 bits round a lot, and
# differently from batch to batch: on SmolLM2 0.28 was seen.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.15, "float16": 0.05, "int8": 0.6, "w8a16": 0.3}


class SelfTest:
    """The distributions that a model's own forward pass gives for the test's sequences."""

    def __init__(self, model: Any) -> None:
        """Run a model of Transformers, before its layers are replaced."""
        self._name = type(model).__name__
        vocab_len = int(model.get_input_embeddings().weight.shape[0])
        longest = max(_LENGTHS)
        texts = [[(31 * (place + row * longest) + 7) % vocab_len for place in range(longest)] for row in range(3)]
        self._texts = [tuple(text[:length]) for text, length in zip(texts, _LENGTHS, strict=True)]
        self._branch = tuple(texts[2][:_BRANCH_LEN])
        self._texts.append(self._texts[0][:_BRANCH_AT] + self._branch)
        # Padding on the right is invisible to the tokens before it.
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in self._texts], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
        rows = torch.stack([logits[row, len(text) - 1] for row, text in enumerate(self._texts)])
        self._expected = rows.float().softmax(-1)

    def check(
        self,
        open_handle: Callable[[], int],
        fork: Callable[[int, int], int],
        step: Callable[[Sequence[Row]], torch.Tensor],
        dtype: str,
    ) -> int:
        """Run the test on an engine's handles; return the size of its vocabulary.

        `step` runs rows, and returns the logits after each. Raise `UnsupportedModel` if a step fails, or if its
        distributions are further from those of the model's own forward pass than the `dtype` explains.
        """
        try:
            with torch.inference_mode():
                found = self._run(open_handle, fork, step).float().softmax(-1)
        except EngineError:
            raise
        except Exception as error:
            raise unsupported(self._name, f"its first step failed ({first_line(error)})") from error
        apart, most = float((found - self._expected).abs().sum(-1).max() / 2), TOLERANCES.get(dtype, 0.01)
        if not apart <= most:
            raise unsupported(
                self._name,
                f"in {dtype} its distributions are {apart:.2f} from those of its own forward pass, where "
                f"{most:g} would be rounding",
            )
        return int(found.shape[-1])

    def check_model(self, model: Any, arena: KVStore, dtype: str) -> int:
        """Run the test on a model with our attention, whose keys and values go to `arena`; otherwise like `check`.

        If it fails for a model with recurrent layers, try again with one token at once in these.
        """
        states = model.states
        if states is None or states.one_by_one:
            return self._check_model(model, arena, dtype)
        try:
            return self._check_model(model, arena, dtype)
        except UnsupportedModel:
            states.one_by_one = True
            return self._check_model(model, arena, dtype)

    def _check_model(self, model: Any, arena: KVStore, dtype: str) -> int:
        forward, cells = ForwardPass(model, arena, 1, by_blocks=False), SlotAllocator(NUM_SLOTS, len(self._texts))
        if model.states is not None:
            model.states.resize(NUM_SLOTS, NUM_SLOTS)

        def step(rows: Sequence[Row]) -> torch.Tensor:
            cells.allocate(rows)
            with step_batch(cells, rows, model.states) as batch:
                given = (batch.tokens, batch.positions, batch.slots)
                tokens, positions, slots = (torch.from_numpy(part).to(arena.device) for part in given)
                return forward.logits(tokens, positions, slots, SpanAttention(batch, arena.device))[batch.outputs]

        return self.check(cells.open, cells.fork, step, dtype)

    def _run(
        self,
        open_handle: Callable[[], int],
        fork: Callable[[int, int], int],
        step: Callable[[Sequence[Row]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the logits after each sequence, the branch last."""
        handles = [open_handle() for _ in _LENGTHS]
        known = list(zip(handles, self._texts, _FIRST, strict=False))
        step([Row(handle, text[:length]) for handle, text, length in known])
        branch = Row(fork(handles[0], _BRANCH_AT), self._branch)
        return step([*(Row(handle, text[length:]) for handle, text, length in known), branch])
