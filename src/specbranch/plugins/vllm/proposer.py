"""The proposer: a thin layer between vLLM's hook and the draft client.

vLLM calls `propose` after every step, in the worker, and verifies what it returns in the next step. The hook gives rows
without request ids, in an order that changes, and never says that a request ended; sessions are found by content, so
none of this matters here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.settings import read_settings
from specbranch.plugins.vllm.slate import Shown, Slate, open_slate
from specbranch.service.client import Committed, DraftClient

_Array = np.ndarray[Any, np.dtype[Any]]


class SpecBranchProposer:
    """Made by vLLM in every worker; only the one whose drafts vLLM takes talks to the service."""

    def __init__(self, vllm_config: Any) -> None:
        compat.warn_if_untested()
        self._most = compat.num_speculative_tokens(vllm_config)
        self._max_model_len = compat.max_model_len(vllm_config)
        self._is_output_rank = compat.is_output_rank()
        self._client: DraftClient | None = None
        self._runner: Any = None
        self._lens = [0] * (self._most + 1)  # rows by the length of their submission
        self._asides: Counter[str] = Counter()
        self.use(compat.own_config(vllm_config))
        self._slate: Slate | None = None
        if self._is_output_rank:
            compat.introduce_runners()
            self._slate = open_slate(lambda: (compat.model_name(vllm_config), compat.engine_index(vllm_config)))
        self._show()

    def use(self, section: Mapping[str, Any]) -> None:
        """Take other settings from now on; wrong ones raise, and the old ones stay."""
        settings = read_settings(section)
        options = settings.client_options(self._most)
        if self._client is not None:
            self._client.close()
        # Without a planner there is nothing to ask for.
        self._client = DraftClient(options) if self._is_output_rank and options.planner != "none" else None

        self._keys = settings.keys
        self._address = settings.address

    def counts(self) -> dict[str, float]:
        """What the client did since the settings were last taken."""
        return asdict(self._client.counts) if self._client else {}

    def meet(self, runner: Any) -> None:
        """The runner that is about to call `propose`; vLLM's hook does not say."""
        self._runner = runner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM's CPU worker without asking whether it exists; there is nothing to load here."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: _Array,
        token_ids_cpu: _Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every row of the batch; empty for rows in chunked prefill, without a draft, or at their end.

        Rows with an adapter or with images stand aside: the draft model knows neither, so the service is not told.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [index for index, sampled in enumerate(sampled_token_ids) if len(sampled)]
        if self._client is None or not rows:
            return drafts
        if self._runner is not None:
            aside = compat.rows_aside(self._runner, len(drafts))
            self._asides.update(aside[index] for index in rows if index in aside)
            rows = [index for index in rows if index not in aside]
        if rows:
            self._fill(drafts, rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        self._show()
        return drafts

    def _fill(
        self,
        drafts: list[list[int]],
        rows: Sequence[int],
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: _Array,
        token_ids_cpu: _Array,
    ) -> None:
        """Put the drafts of these rows in their places."""
        assert self._client is not None, "without a client there is nobody to ask"
        lengths = [int(num_tokens_no_spec[index]) for index in rows]
        committed = [
            Committed(token_ids_cpu[index, :length], len(sampled_token_ids[index]))
            for index, length in zip(rows, lengths, strict=True)
        ]
        for index, length, draft in zip(rows, lengths, self._client.propose(committed), strict=True):
            # vLLM adds a token of its own behind the draft; both must fit.
            room = self._max_model_len - length - 1
            drafts[index] = draft[: max(0, min(self._most, room))]
            self._lens[len(drafts[index])] += 1

    def _show(self) -> None:
        """Let the process of vLLM's metrics endpoint see the counters."""
        if self._slate is None:
            return
        client = self._client
        self._slate.show(
            Shown(
                self._slate.model,
                self._slate.engine,
                self._address,
                self._keys,
                client.namespace if client else b"",
                client.is_lagging if client else False,
                self.counts(),
                self._lens,
                dict(self._asides),
            )
        )
