"""Between vLLM's Model Runner V2 and the proposer: texts from the device, drafts to all ranks.

V2 keeps texts on its device and takes drafts as a tensor, with as many places in every row. A place without a draft
holds the last sampled token, as with vLLM's own n-gram speculator; it is verified like any other. Where vLLM asks for
lengths (without asynchronous scheduling, or with adaptive verification) such places are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbranch.plugins.vllm.compat import config, runner, v2
from specbranch.plugins.vllm.compat.features import FeatureError
from specbranch.plugins.vllm.proposer import SpecBranchProposer
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.plugins.vllm.v2.link import link_to
from specbranch.plugins.vllm.v2.texts import Array, Texts

log = logging.getLogger(__name__)

_NOTHING = -1  # a place without a draft, until all ranks have the drafts
_CONFIDENCE = 0.9  # in a drafted token; the service does not tell its own


class Speculator:
    """Created by V2's runner in every worker. Only the first rank asks for drafts; the others get what it got."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are verified as certain: accepted with the target's own probability

    def __init__(self, vllm_config: Any, device: Any, req_states: Any) -> None:
        import torch

        self._proposer = SpecBranchProposer(vllm_config)
        v2.refuse_context_parallelism(vllm_config)
        self._is_output_rank = runner.is_output_rank()
        self._device = device
        self._states = req_states
        self._runner: Any = None
        self._lens: dict[str, int] = {}  # of the last drafts, by request
        self._has_failed = False
        self.num_speculative_steps = config.num_speculative_tokens(vllm_config)
        self._back = torch.arange(self.num_speculative_steps + 2, 0, -1, device=device)
        num_slots, max_len = req_states.max_num_reqs, req_states.max_model_len
        num_news = num_slots * (self.num_speculative_steps + 4)
        self._link = link_to(device, max(max_len, num_news), num_slots * self.num_speculative_steps)
        self._texts = Texts(num_slots, max_len, self._whole_text)
        self.enable_adaptive_verification = v2.has_adaptive_verification(vllm_config)
        self.draft_token_confidence_probs = torch.zeros(num_slots, self.num_speculative_steps, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def use(self, settings: ProposerSettings) -> None:
        """Take other settings from now on."""
        if settings.trained_predictor is not None:
            raise FeatureError(
                "a trained predictor needs vLLM's Model Runner V1; set `runner` to 'v1' and restart vLLM"
            )
        self._proposer.use(settings)

    def counts(self) -> dict[str, float]:
        """The proposer's counters."""
        return self._proposer.counts()

    def meet(self, model_runner: Any, prompts: Sequence[Sequence[int]], num_pads: int = 0) -> None:
        """The runner is about to prefill these prompts. Never raises."""
        self._runner = model_runner
        self._proposer.meet(None, prompts)

    def cut(self, draft_token_ids: Any) -> Any:
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

        num_rows = input_batch.num_reqs
        most = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if dummy_run or runner.is_warmup(input_batch.req_ids) or not most:
            self._lens = {}
            return torch.zeros(num_rows, self.num_speculative_steps, dtype=torch.int64, device=self._device)
        if self._is_output_rank:
            drafts = self._link.send(self._ask(input_batch, num_sampled, most))
        else:
            shape = num_rows, self.num_speculative_steps
            drafts = torch.empty(shape, dtype=torch.int64, device=self._device)
        drafts = runner.broadcast(drafts)
        is_filled = drafts != _NOTHING
        self.draft_token_confidence_probs[:num_rows] = is_filled * _CONFIDENCE
        return torch.where(is_filled, drafts, last_sampled.view(-1)[input_batch.idx_mapping, None])

    def _ask(self, input_batch: Any, num_sampled: Any, most: int) -> Array:
        """What the proposer has for every row; nothing if anything fails, for the other ranks wait for an answer."""
        answer = np.full((input_batch.num_reqs, self.num_speculative_steps), _NOTHING, dtype=np.int64)
        drafts: list[list[int]] = [[] for _ in input_batch.req_ids]
        if self._proposer.is_on:
            try:
                drafts = [draft[:most] for draft in self._drafts(input_batch, num_sampled)]
            except Exception:
                if not self._has_failed:
                    log.exception("drafting failed; such steps go without drafts. Logged once")
                self._has_failed = True
        for row, draft in enumerate(drafts):
            answer[row, : len(draft)] = draft
        self._lens = {name: len(draft) for name, draft in zip(input_batch.req_ids, drafts, strict=True)}
        return answer

    def _drafts(self, input_batch: Any, num_sampled: Any) -> list[list[int]]:
        names, slots = input_batch.req_ids, input_batch.idx_mapping_np
        if self._runner is not None:
            self._proposer.meet(v2.in_the_form_of_v1(self._runner, names, slots), ())
        sampled: list[list[int]] = []
        texts: dict[int, Array] = {}
        news = self._link.fetch(self._news(input_batch.idx_mapping, num_sampled))
        for row, (num_new, length, *last) in enumerate(news.tolist()):
            new = last[len(last) - num_new :]
            sampled.append(new)
            if new:
                before = last[len(last) - num_new - 1]
                texts[row] = self._texts.extend(int(slots[row]), names[row], length, before, np.array(new, np.int32))
        return self._proposer.draft(sampled, texts)

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
