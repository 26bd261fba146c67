"""The proposer: a thin layer between vLLM's hook and the draft client.

vLLM calls `propose` after every step, in the worker, and verifies what it returns in the next step. The hook gives rows
without request ids, in an order that changes, and never says that a request ended; sessions are found by content, so
none of this matters here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.settings import read_settings
from specbranch.service.client import Committed, DraftClient

_Array = np.ndarray[Any, np.dtype[Any]]


class SpecBranchProposer:
    """Made by vLLM in every worker; only the one whose drafts vLLM takes talks to the service."""

    def __init__(self, vllm_config: Any) -> None:
        compat.warn_if_untested()
        compat.mend_cpu_sampler()
        self._most = compat.num_speculative_tokens(vllm_config)
        self._max_model_len = compat.max_model_len(vllm_config)
        self._is_output_rank = compat.is_output_rank()
        self._client: DraftClient | None = None
        self.use(compat.own_config(vllm_config))

    def use(self, section: Mapping[str, Any]) -> None:
        """Take other settings from now on; wrong ones raise, and the old ones stay."""
        options = read_settings(section).client_options(self._most)
        if self._client is not None:
            self._client.close()
        # Without a planner there is nothing to ask for.
        self._client = DraftClient(options) if self._is_output_rank and options.planner != "none" else None

    def counts(self) -> dict[str, float]:
        """What the client did since the settings were last taken."""
        return asdict(self._client.counts) if self._client else {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM's CPU worker without asking whether it exists; there is nothing to load here."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: _Array,
        token_ids_cpu: _Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every row of the batch; empty for rows in chunked prefill, without a draft, or at their end."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [index for index, sampled in enumerate(sampled_token_ids) if len(sampled)]
        if self._client is None or not rows:
            return drafts
        lengths = [int(num_tokens_no_spec[index]) for index in rows]
        committed = [
            Committed(token_ids_cpu[index, :length], len(sampled_token_ids[index]))
            for index, length in zip(rows, lengths, strict=True)
        ]
        for index, length, draft in zip(rows, lengths, self._client.propose(committed), strict=True):
            # vLLM adds a token of its own behind the draft; both must fit.
            room = self._max_model_len - length - 1
            drafts[index] = draft[: max(0, min(self._most, room))]
        return drafts
