"""Rule B in vLLM's V1 runner: how its requests sample, and what their draft tokens were drawn from.

The runner tests draft tokens by p/q where it has q for all of them, whole rows over the vocabulary; else it takes them
as certain. Both are exact. Its rows are cleared before a proposer is called and read in the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.core.sampling import Sampling

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of probabilities that are kept for a runner
_LEAST_TEMPERATURE = 1e-5  # below it vLLM is greedy
_MOST_TEMPERATURE = 100.0
_MOST_KNOWN = 1024
_PROBS, _NAMES = "_draft_probs", "_draft_prob_req_ids"


class DraftProbs:
    """The rows of probabilities of one runner: memory that is kept, and zero but for what was written last."""

    def __init__(self, vocab_len: int, most: int) -> None:
        self._vocab_len = vocab_len
        self._most = most
        self._rows: Any = None
        self._written: list[Any] = []
        self._has_failed = False
        self._known: dict[str, tuple[Any, Sampling | None]] = {}  # requests by name

    def samplings(self, runner: Any, rows: Sequence[int]) -> dict[int, Sampling]:
        """How these rows sample, as far as their draft tokens may be drawn by chance.

        Nothing where the runner does not take probabilities, or where there would be too many of them.
        """
        if not hasattr(runner, _PROBS) or not hasattr(runner, _NAMES) or self._has_failed:
            return {}
        if logits_len(runner, self._vocab_len) != self._vocab_len:
            return {}  # rows of another width than its logits would be read wrongly
        try:
            names = runner.input_batch.req_ids
            found = {row: self._sampling_of(names[row], runner.requests[names[row]].sampling_params) for row in rows}
        except (AttributeError, KeyError, IndexError):
            return {}
        sampled = {row: sampling for row, sampling in found.items() if sampling is not None}
        size = 4 * self._vocab_len * self._most * len(runner.input_batch.req_ids)
        return sampled if size <= MOST_BYTES else {}

    def _sampling_of(self, name: str, parameters: Any) -> Sampling | None:
        """Of a request, which is asked at every step."""
        known = self._known.get(name)
        if known is None or known[0] is not parameters:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[name] = parameters, sampling_of(parameters)
        return known[1]

    def hand_over(
        self, runner: Any, drafts: Sequence[Sequence[int]], drawn_from: Mapping[int, Sequence[Distribution | None]]
    ) -> None:
        """Give the runner what the drafts of its rows were drawn from; nothing if none was drawn by chance.

        Never raises: without probabilities all drafts of the step are taken as certain.
        """
        try:
            self._hand_over(runner, drafts, drawn_from)
        except Exception:
            log.exception("draft probabilities could not be handed to vLLM; draft tokens are proposed as certain now")
            self._has_failed = True
            self._rows = None

    def _hand_over(
        self, runner: Any, drafts: Sequence[Sequence[int]], drawn_from: Mapping[int, Sequence[Distribution | None]]
    ) -> None:
        if not any(any(row) for row in drawn_from.values()):
            return
        places: list[int] = []
        tokens: list[int] = []
        probs: list[float] = []
        for row, draft in enumerate(drafts):
            known = drawn_from.get(row, ())
            for column, token in enumerate(draft):
                q = known[column] if column < len(known) else None
                ids, values = (q.ids, q.probs) if q else ((token,), (1.0,))
                total = float(sum(values))
                places += [row * self._most + column] * len(ids)
                tokens += ids
                probs += [float(value) / total for value in values]
        if not places:
            return
        setattr(runner, _PROBS, self._filled(runner.device, len(drafts), (places, tokens), probs))
        setattr(runner, _NAMES, list(runner.input_batch.req_ids))

    def _filled(self, device: Any, num_rows: int, indices: tuple[list[int], list[int]], probs: list[float]) -> Any:
        import torch

        if self._rows is None or len(self._rows) < num_rows:
            num_kept = max(num_rows, 2 * len(self._rows) if self._rows is not None else 0)
            self._rows = None  # the old ones go first
            self._rows = torch.zeros(num_kept, self._most, self._vocab_len, device=device)
            self._written = []
        flat = self._rows.view(-1, self._vocab_len)
        if self._written:
            flat[self._written[0], self._written[1]] = 0.0
        self._written = [torch.tensor(one, device=device) for one in indices]
        flat[self._written[0], self._written[1]] = torch.tensor(probs, device=device)
        return self._rows


def sampling_of(parameters: Any) -> Sampling | None:
    """How a request samples; None if its draft tokens must not be drawn by chance. A seed of its own stays here.

    A grammar or a thinking budget cuts a draft by its tokens, and what is tested must not depend on them.
    """
    temperature = getattr(parameters, "temperature", None)
    if temperature is None or not is_sampled(temperature):
        return None
    for cause in ("structured_outputs", "guided_decoding", "thinking_token_budget"):
        if getattr(parameters, cause, None) is not None:
            return None
    top_k = getattr(parameters, "top_k", 0) or 0
    return Sampling(float(temperature), float(getattr(parameters, "top_p", 1.0)), max(int(top_k), 0))


def logits_len(runner: Any, vocab_len: int) -> int:
    """How many tokens the logits of a runner's model have; `vocab_len` if it does not tell."""
    processor = getattr(getattr(runner, "model", None), "logits_processor", None)
    return int(getattr(processor, "org_vocab_size", vocab_len))


def is_sampled(temperature: float) -> bool:
    """Whether draft tokens may be drawn at this temperature; vLLM is greedy below."""
    return _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE
