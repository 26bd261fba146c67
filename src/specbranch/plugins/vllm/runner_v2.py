"""Between vLLM's Model Runner V2 and the proposer: texts from the device, drafts to all ranks.

V2 keeps texts on its device and takes drafts as a tensor, with as many places in every row. A place without a draft
holds the last sampled token, as with vLLM's own n-gram speculator; it is verified like any other. Where vLLM asks for
lengths (without asynchronous scheduling, or with adaptive verification) such places are left out.

For sampled rows the ranks also get what draft tokens were drawn from. Without it all of them are verified as certain,
which is as exact, whatever they were drawn from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.hidden_states import FeatureError
from specbranch.plugins.vllm.proposer import SpecBranchProposer
from specbranch.plugins.vllm.runner_v2_device import WIDTH, Array, DraftLogits, HostTokens, copier_for, has_room, pack
from specbranch.plugins.vllm.settings import ProposerSettings

log = logging.getLogger(__name__)

_NOTHING = -1  # a place without a draft, until all ranks have the drafts
_CONFIDENCE = 0.9  # in a drafted token; the service does not tell its own


class Speculator:
    """Created by V2's runner in every worker. Only the first rank asks for drafts; the others get what it got."""

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: Any, req_states: Any) -> None:
        import torch

        self._proposer = SpecBranchProposer(vllm_config)
        compat.check_context_parallelism(vllm_config)
        compat.wrap_runners()  # all ranks look how requests sample
        self._is_output_rank = compat.is_output_rank()
        self._device = device
        self._states = req_states
        self._runner: Any = None
        self._lens: dict[str, int] = {}  # of the last drafts, by request
        self._has_failed = False
        self.num_speculative_steps = compat.num_speculative_tokens(vllm_config)
        self._all_slots = torch.arange(req_states.max_num_reqs, device=device)
        self._back = torch.arange(self.num_speculative_steps + 2, 0, -1, device=device)
        num_slots, max_len = req_states.max_num_reqs, req_states.max_model_len
        num_news = num_slots * (self.num_speculative_steps + 4)
        self._link = copier_for(device, max(max_len, num_news), num_slots * self.num_speculative_steps * (1 + WIDTH))
        self.draft_logits: Any = None  # of the drafts that vLLM verifies next; None: all of them are certain
        self._logits: DraftLogits | None = None
        self._vocab_len = compat.vocab_len(vllm_config)
        size = num_slots, self.num_speculative_steps, self._vocab_len
        if self._proposer.uses_rejection and has_room(*size):
            self._logits = DraftLogits(*size, device)
        elif self._proposer.uses_rejection:
            log.info("draft tokens are proposed as certain: what they are drawn from would take too much memory")
        self._texts = HostTokens(num_slots, max_len, self._whole_text)
        self.enable_adaptive_verification = compat.has_adaptive_verification(vllm_config)
        self.draft_token_confidence_probs = torch.zeros(num_slots, self.num_speculative_steps, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def configure(self, settings: ProposerSettings) -> None:
        """Take other settings from now on."""
        if settings.trained_predictor is not None:
            raise FeatureError(
                "a trained predictor needs vLLM's Model Runner V1; set `runner` to 'v1' and restart vLLM"
            )
        self.draft_logits = None  # first, on all ranks: only one of them can fail below
        if self._logits is not None:
            self._logits.write_certain(self._all_slots, self._states.draft_tokens)
        self._proposer.configure(settings)

    def counts(self) -> dict[str, float]:
        """The proposer's counters."""
        return self._proposer.counts()

    def on_step_scheduled(self, model_runner: Any, news: compat.StepInfo) -> None:
        """The runner is about to run a step with this news. Never raises."""
        self._runner = model_runner
        self._proposer.on_step_scheduled(None, news)

    def trim_drafts(self, draft_token_ids: Any) -> Any:
        """Shorten the drafts that the scheduler asks for to the places that are filled."""
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
        """Drafts for every row # [rows, places]. Equal on all ranks; never raises on one of them only.

        `num_speculative_tokens`: how many places vLLM will verify at this load.
        """
        import torch

        num_rows, slots = input_batch.num_reqs, input_batch.idx_mapping
        most = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        is_warmup = compat.is_warmup(input_batch.req_ids)
        if dummy_run or is_warmup or not most:
            self._lens = {}
            drafts = torch.zeros(num_rows, self.num_speculative_steps, dtype=torch.int64, device=self._device)
            if is_warmup and not dummy_run and self._logits is not None:
                self._logits.write_certain(slots, drafts)
            return drafts
        is_sampled, samplings = self._look(input_batch)
        if self._is_output_rank:
            packed = self._link.send(self._ask(input_batch, num_sampled, most, samplings))
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
            # A row may be left out of the next steps, and be verified in one that has drawn tokens.
            self._logits.write_certain(slots, drafts)
        return drafts

    def _look(self, input_batch: Any) -> tuple[bool, dict[int, RequestSampling]]:
        """Whether any row samples, and how those do whose draft tokens may be drawn by chance: equal on all ranks."""
        if self._logits is None or self._runner is None or not self._proposer.uses_rejection:
            return False, {}
        if not compat.is_any_sampled(self._runner, input_batch):
            return False, {}
        return True, compat.samplings(self._runner, input_batch, self._vocab_len)

    def _ask(self, input_batch: Any, num_sampled: Any, most: int, samplings: Mapping[int, RequestSampling]) -> Array:
        """What the proposer has for every row; nothing if anything fails, for the other ranks wait for an answer."""
        drafts: list[list[int]] = [[] for _ in input_batch.req_ids]
        packed: Array | None = None
        if self._proposer.is_on:
            try:
                drafts = [draft[:most] for draft in self._drafts(input_batch, num_sampled, samplings)]
                sampled_from = {row: known[:most] for row, known in self._proposer.sampled_from.items()}
                packed = self._packed(drafts, samplings, sampled_from)
            except Exception:
                drafts = [[] for _ in input_batch.req_ids]
                if not self._has_failed:
                    log.exception("drafting failed; such steps go without drafts. Logged once")
                self._has_failed = True
        self._lens = {name: len(draft) for name, draft in zip(input_batch.req_ids, drafts, strict=True)}
        return self._packed(drafts, samplings, {}) if packed is None else packed

    def _packed(
        self,
        drafts: Sequence[Sequence[int]],
        samplings: Mapping[int, RequestSampling],
        sampled_from: Mapping[int, Sequence[Distribution | None]],
    ) -> Array:
        """Drafts, and what they were drawn from if any row is verified by that # [rows, places, 1 or 1 + WIDTH]."""
        answer = np.full((len(drafts), self.num_speculative_steps), _NOTHING, dtype=np.int64)
        for row, draft in enumerate(drafts):
            answer[row, : len(draft)] = draft
        return pack(answer, samplings, sampled_from) if samplings else answer[..., None]

    def _drafts(self, input_batch: Any, num_sampled: Any, samplings: Mapping[int, RequestSampling]) -> list[list[int]]:
        names, slots = input_batch.req_ids, input_batch.idx_mapping_np
        if self._runner is not None:
            self._proposer.on_step_scheduled(compat.in_the_form_of_v1(self._runner, names, slots), compat.StepInfo())
        sampled: list[list[int]] = []
        texts: dict[int, Array] = {}
        news = self._link.fetch(self._news(input_batch.idx_mapping, num_sampled))
        for row, (num_new, length, *last) in enumerate(news.tolist()):
            new = last[len(last) - num_new :]
            sampled.append(new)
            if new:
                before = last[len(last) - num_new - 1]
                texts[row] = self._texts.extend(int(slots[row]), names[row], length, before, np.array(new, np.int32))
        return self._proposer.draft_rows(sampled, texts, samplings)

    def _news(self, slots: Any, num_sampled: Any) -> Any:
        """On the device: what a step added to each row # [rows, 2 + window].

        The number of new tokens, the length of the text, and a window of its last tokens: at least one that was there
        before the step.
        """
        import torch

        lengths = self._states.total_len.gpu[slots][:, None]
        places = (lengths - self._back).clamp(min=0)
        window = self._states.all_token_ids.gpu[slots[:, None], places]
        return torch.cat([num_sampled[:, None], lengths, window], dim=1).to(torch.int32)

    def _whole_text(self, slot: int, length: int) -> Array:
        return self._link.fetch(self._states.all_token_ids.gpu[slot, :length])
