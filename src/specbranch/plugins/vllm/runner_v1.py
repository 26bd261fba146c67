"""The proposer for vLLM's Model Runner V1 and its `custom_class` hook.

If the settings and the batch allow it, drafts are padded to equal length with tokens of id -1, which vLLM never
accepts. vLLM calls `propose` after every step, in the worker, and verifies the returned drafts in the next step. The
hook passes rows without their requests, so the patched runner passes itself to the proposer before each step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.compat import BatchRow, StepInfo
from specbranch.plugins.vllm.hidden_states import FeatureHook
from specbranch.plugins.vllm.proposer import BatchDrafter
from specbranch.plugins.vllm.settings import ProposerSettings, plugin_settings

_MAX_PADDED = 128  # tokens of a step; up to this number, more tokens cost a GPU next to nothing
_Array = np.ndarray[Any, np.dtype[Any]]


class SpecBranchProposer:
    """Our proposer for Model Runner V1.

    vLLM creates an instance in every worker; only the worker whose drafts vLLM uses talks to the draft service.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = plugin_settings(compat.own_config(vllm_config), os.environ)
        if settings.runner == "v2":
            compat.check_runner(vllm_config)
        self._vllm_config = vllm_config
        self._max_model_len = compat.max_model_len(vllm_config)
        self._runner: Any = None
        self.core = BatchDrafter(vllm_config, settings)
        self.num_pads = 0  # pads that vLLM has counted as draft tokens, and rejected
        if self.core.is_output_rank:
            compat.wrap_runners()

    @property
    def feature_hook(self) -> FeatureHook | None:
        """The hook that records each step's features; None without a trained predictor."""
        return self.core.predictor.feature_hook

    def configure(self, settings: ProposerSettings) -> None:
        """Replace the settings; if the new ones are wrong, raise and keep the old ones."""
        self.core.configure(settings)

    def counts(self) -> dict[str, float]:
        """Return the counters of client and predictor by name, since the settings last changed."""
        return self.core.counts()

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Work around faults of vLLM's CPU sampler, and attach the trained predictor, if any, to the target `model`.

        vLLM calls this after it has loaded the target. Raise if the predictor does not fit, which stops vLLM.
        """
        compat.patch_cpu_sampler()
        self.core.predictor.load_model(model)

    def on_step_scheduled(self, model_runner: Any, news: StepInfo) -> None:
        """Store the runner for `propose`, count the step's padding tokens, and announce its new prompts to the service.

        The runner calls this before it runs the step that `news` describes. Padding tokens (-1) are counted because
        vLLM counts them as draft tokens. Never raise.
        """
        self._runner = model_runner
        self.num_pads += news.num_pads
        self.core.on_step_scheduled(news)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: _Array,
        token_ids_cpu: _Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Get a draft for every row of the batch, and return the tokens; vLLM verifies all of them by exact match.

        vLLM calls this after every step. `sampled_token_ids` has each row's new tokens, `token_ids_cpu` [rows, max
        length] all its tokens, and `num_tokens_no_spec` [rows] the number of all its tokens. If the settings and the
        batch allow padding, pad all rows to equal length, also if no row has a draft.
        """
        rows = compat.v1_rows(self._runner, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        drafts = [[*draft.tokens] for draft in self.core.propose(rows)]  # vLLM may change its lists
        if not self._can_pad(rows):
            return drafts
        length = self.core.max_draft_tokens
        return [draft + [compat.PAD] * (length - len(draft)) for draft in drafts]

    @functools.cached_property
    def _has_graphs(self) -> bool:
        return compat.has_graphs_for_equal_rows(self._vllm_config)

    def _can_pad(self, rows: Sequence[BatchRow]) -> bool:
        """Return whether to pad the drafts of all rows to equal length.

        The settings and the runner must allow it, no row may be in prefill or near its maximum length, and the padded
        step may have at most 128 tokens.
        """
        pad = self.core.settings.pad
        if self._runner is None or pad == "off" or (pad == "auto" and not self._has_graphs):
            return False
        num_places = self.core.max_draft_tokens
        if not all(row.num_new for row in rows) or not 0 < len(rows) * (1 + num_places) <= _MAX_PADDED:
            return False
        # vLLM adds one token of its own after the draft; both must fit.
        if self._max_model_len - max(len(row.tokens) for row in rows) - 1 < num_places:
            return False
        return compat.allows_pads(self._runner)
