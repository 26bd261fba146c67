"""The speculator for vLLM's Model Runner V2: it reads sequences from the device and gives drafts to all ranks.

V2 keeps the tokens of sequences on its device and takes drafts as a tensor, with the same number of draft positions in
every row. A position without a draft token holds the last sampled token, as with vLLM's own n-gram speculator, and is
verified like any other. Where vLLM asks for lengths (without asynchronous scheduling, or with adaptive verification),
such positions are left out.

For sampled rows the ranks also get the distributions that draft tokens were sampled from. Without them each token is
verified as if its probability were 1, which is exact too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbranch.core.distribution import RequestSampling
from specbranch.core.round import Draft
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.compat import Array, StepInfo
from specbranch.plugins.vllm.hidden_states import FeatureError
from specbranch.plugins.vllm.proposer import BatchDrafter
from specbranch.plugins.vllm.runner_v2_device import (
    MAX_BYTES,
    WIDTH,
    DraftLogits,
    HostTokens,
    copier_for,
    has_room,
    pack,
)
from specbranch.plugins.vllm.settings import ProposerSettings, plugin_settings

log = logging.getLogger(__name__)

_NOTHING = -1  # at a position without a draft token, until all ranks have the drafts
_CONFIDENCE = 0.9  # in a drafted token; the service does not send its own


class Speculator:
    """Our speculator for Model Runner V2, which creates an instance in every worker.

    The first tensor-parallel rank gets the drafts and sends them to the other ranks.
    """

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: Any, req_states: Any) -> None:
        import torch

        self._core = BatchDrafter(vllm_config, plugin_settings(compat.own_config(vllm_config), os.environ))
        compat.check_context_parallelism(vllm_config)
        compat.wrap_runners()  # on all ranks: each reads how requests sample
        self._device = device
        self._states = req_states
        self._runner: Any = None
        self._lens: dict[str, int] = {}  # of the last drafts, by request
        self._has_failed = False
        self.num_speculative_steps = compat.num_speculative_tokens(vllm_config)
        self._back = torch.arange(self.num_speculative_steps + 2, 0, -1, device=device)
        num_slots, max_len = req_states.max_num_reqs, req_states.max_model_len
        num_news = num_slots * (self.num_speculative_steps + 4)
        self._copier = copier_for(device, max(max_len, num_news), num_slots * self.num_speculative_steps * (1 + WIDTH))
        self.draft_logits: Any = None  # of the drafts that vLLM verifies next; None if all of them are certain
        self._logits: DraftLogits | None = None
        self._vocab_len = compat.vocab_len(vllm_config)
        size = num_slots, self.num_speculative_steps, self._vocab_len
        if self._core.uses_rejection and has_room(*size):
            self._logits = DraftLogits(*size, device)
        elif self._core.uses_rejection:
            log.info(
                "draft tokens are proposed as certain: the distributions that they are sampled from would take more "
                "than %d MB of memory; for sampled ones lower max_num_seqs or num_speculative_tokens",
                MAX_BYTES >> 20,
            )
        self._texts = HostTokens(num_slots, max_len, self._whole_text)
        self.enable_adaptive_verification = compat.has_adaptive_verification(vllm_config)
        self.draft_token_confidence_probs = torch.zeros(num_slots, self.num_speculative_steps, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no graph to capture."""

    def capture(self) -> None:
        """Do nothing: there is no graph to capture."""

    def configure(self, settings: ProposerSettings) -> None:
        """Replace the settings. Raise `FeatureError` for a trained predictor, which works on V1 only."""
        import torch

        if settings.trained_predictor is not None:
            raise FeatureError(
                "a trained predictor needs vLLM's Model Runner V1; set `runner` to 'v1' and restart vLLM"
            )
        self.draft_logits = None  # first, on all ranks: only one of them can fail below
        if self._logits is not None:
            all_slots = torch.arange(self._states.max_num_reqs, device=self._device)
            self._logits.write_certain(all_slots, self._states.draft_tokens)
        self._core.configure(settings)

    def counts(self) -> dict[str, float]:
        """Return the counters of the client by name, since the settings last changed."""
        return self._core.counts()

    def on_step_scheduled(self, model_runner: Any, news: StepInfo) -> None:
        """Store the runner for `propose`, and announce the step's new prompts to the draft service. Never raise.

        The runner calls this before it runs the step that `news` describes.
        """
        self._runner = model_runner
        self._core.on_step_scheduled(news)

    def trim_drafts(self, draft_token_ids: Any) -> Any:
        """Cut off the positions without draft tokens from the drafts that vLLM's scheduler requests.

        `draft_token_ids` is vLLM's object with the drafts of all rows. It is changed in place and returned.
        """
        draft_token_ids.draft_token_ids = [
            draft[: self._lens.get(name, 0)]
            for name, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        ]
        return draft_token_ids

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Get drafts for a batch; return their tokens [rows, draft positions], the same on all ranks.

        Never raise on one rank alone. The arguments are vLLM's: `num_speculative_tokens` is how many positions it will
        verify at this load, None for all.
        """
        import torch

        num_rows, slots = input_batch.num_reqs, input_batch.idx_mapping
        max_len = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        is_warmup = compat.is_warmup(input_batch.req_ids)
        if dummy_run or is_warmup or not max_len:
            self._lens = {}
            drafts = torch.zeros(num_rows, self.num_speculative_steps, dtype=torch.int64, device=self._device)
            if is_warmup and not dummy_run and self._logits is not None:
                self._logits.write_certain(slots, drafts)
            return drafts
        is_sampled, samplings = self._read_samplings(input_batch)
        if self._core.is_output_rank:
            packed = self._copier.send(self._packed_drafts(input_batch, num_sampled, max_len, samplings))
        else:
            shape = num_rows, self.num_speculative_steps, 1 + WIDTH if samplings else 1
            packed = torch.empty(shape, dtype=torch.int64, device=self._device)
        packed = compat.broadcast(packed)
        drafts = packed[..., 0]
        is_filled = drafts != _NOTHING
        self.draft_token_confidence_probs[:num_rows] = is_filled * _CONFIDENCE
        drafts = torch.where(is_filled, drafts, last_sampled.view(-1)[slots, None])
        self.draft_logits = None
        if self._logits is not None and samplings:
            self._logits.write(slots, drafts, packed[..., 1:])
            self.draft_logits = self._logits.values
        elif self._logits is not None and is_sampled:
            # A row may be left out of the next steps, and be verified in one that has sampled tokens.
            self._logits.write_certain(slots, drafts)
        return drafts

    def _read_samplings(self, input_batch: Any) -> tuple[bool, dict[int, RequestSampling]]:
        """Return whether any row is not greedy, and the sampling parameters of rows for which the draft may sample.

        The second value has the parameters by row index. The result is (False, {}) if all rows are greedy, if the
        settings do not ask for rejection sampling, if the distributions would take too much memory, or if vLLM's runner
        is not known yet. It is the same on all ranks.
        """
        if self._logits is None or self._runner is None or not self._core.uses_rejection:
            return False, {}
        if not compat.is_any_sampled(self._runner, input_batch):
            return False, {}
        return True, compat.samplings(self._runner, input_batch, self._vocab_len)

    def _packed_drafts(
        self, input_batch: Any, num_sampled: Any, max_len: int, samplings: Mapping[int, RequestSampling]
    ) -> Array:
        """Get a draft of at most `max_len` tokens for every row, and return all drafts packed for the other ranks.

        `samplings` has the sampling parameters of rows for which the draft may sample its tokens. If anything fails,
        return empty drafts and do not raise, because the other ranks wait for the result.
        """
        drafts = [Draft([]) for _ in input_batch.req_ids]
        packed: Array | None = None
        if self._core.is_on:
            try:
                found = self._drafts(input_batch, num_sampled, samplings)
                drafts = [Draft(draft.tokens[:max_len], draft.sampled_from[:max_len]) for draft in found]
                packed = self._pack(drafts, samplings)
            except Exception:
                drafts = [Draft([]) for _ in input_batch.req_ids]
                if not self._has_failed:
                    log.exception("drafting failed; such steps go without drafts. Logged once")
                self._has_failed = True
        self._lens = {name: len(draft.tokens) for name, draft in zip(input_batch.req_ids, drafts, strict=True)}
        return self._pack(drafts, samplings) if packed is None else packed

    def _pack(self, drafts: Sequence[Draft], samplings: Mapping[int, RequestSampling]) -> Array:
        """Return drafts as one array to send to all ranks, [rows, positions, 1 or 1 + WIDTH].

        If `samplings` names any row, the array also holds the distributions that draft tokens were sampled from.
        """
        places = np.full((len(drafts), self.num_speculative_steps), _NOTHING, dtype=np.int64)
        for row, draft in enumerate(drafts):
            places[row, : len(draft.tokens)] = draft.tokens
        if not samplings:
            return places[..., None]
        sampled_from = {row: draft.sampled_from for row, draft in enumerate(drafts) if any(draft.sampled_from)}
        return pack(places, samplings, sampled_from)

    def _drafts(self, input_batch: Any, num_sampled: Any, samplings: Mapping[int, RequestSampling]) -> list[Draft]:
        names, slots = input_batch.req_ids, input_batch.idx_mapping_np.tolist()
        texts: list[tuple[Array, int]] = []
        news = self._copier.fetch(self._news(input_batch.idx_mapping, num_sampled))
        for name, slot, (num_new, length, *last) in zip(names, slots, news.tolist(), strict=True):
            text = np.empty(0, np.int32)
            if num_new:
                new = np.array(last[len(last) - num_new :], np.int32)
                text = self._texts.extend(slot, name, length, last[len(last) - num_new - 1], new)
            texts.append((text, num_new))
        return self._core.propose(compat.v2_rows(self._runner, names, slots, texts, samplings))

    def _news(self, slots: Any, num_sampled: Any) -> Any:
        """Return each row's newest tokens after a step, as an int32 tensor on the device, [rows, 4 + positions].

        A row has the number of new tokens (`num_sampled`), the length of the sequence, and its last tokens: all new
        ones, and at least one older token before them. `slots` are the rows' indices in the runner's states.
        """
        import torch

        lengths = self._states.total_len.gpu[slots][:, None]
        places = (lengths - self._back).clamp(min=0)
        window = self._states.all_token_ids.gpu[slots[:, None], places]
        return torch.cat([num_sampled[:, None], lengths, window], dim=1).to(torch.int32)

    def _whole_text(self, slot: int, length: int) -> Array:
        return self._copier.fetch(self._states.all_token_ids.gpu[slot, :length])
