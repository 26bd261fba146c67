"""The proposer: a thin layer between vLLM's hook and the draft client.

vLLM calls `propose` after every step, in the worker, and verifies what it returns in the next step. The hook passes
rows without request ids, in an order that changes, and never tells that a request has ended. The service finds sessions
by their tokens, so none of this matters here.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.hrad.network import Hrad, read_hrad
from specbranch.plugins.vllm import compat, hidden_states
from specbranch.plugins.vllm.hidden_states import HradRunner
from specbranch.plugins.vllm.settings import ProposerSettings, RequestLimits, read_settings
from specbranch.plugins.vllm.stats_file import PublishedStats, StatsFile, open_stats_file
from specbranch.service.client.gate import Decision, Gate, StepTimer
from specbranch.service.client.interface import DraftSource, SequenceUpdate
from specbranch.service.client.pool import draft_client

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, whose level and form it so has

_MAX_PADDED = 128  # tokens of a step, up to which more of them cost a GPU next to nothing
_MAX_GATES = 64
_Array = np.ndarray[Any, np.dtype[Any]]


class SpecBranchProposer:
    """Created by vLLM in every worker; only the one whose drafts vLLM takes talks to the service."""

    def __init__(self, vllm_config: Any) -> None:
        compat.layout(vllm_config).check_supported()  # before any weights are loaded
        compat.warn_if_untested()
        self._vllm_config = vllm_config
        self._most = compat.num_speculative_tokens(vllm_config)
        self._max_model_len = compat.max_model_len(vllm_config)
        self._is_output_rank = compat.is_output_rank()
        self._client: DraftSource | None = None
        self._gate: Gate | None = None
        self._gates: dict[str, Gate] = {}  # by the settings that they are for
        self._decided: dict[int, bool] = {}  # what was logged of the gate
        self._pace = StepTimer(time.monotonic)
        self._had_drafts = False
        self._has_asked = False  # in the last step
        self._runner: Any = None
        self._lens = [0] * (self._most + 1)  # rows by the number of draft tokens
        self._asides: Counter[str] = Counter()
        self._limits = RequestLimits()
        self._settings: ProposerSettings | None = None
        self._model: Any = None
        self._embed: Callable[[Sequence[int]], Any] | None = None
        self._hrad: Hrad | None = None
        self._foresight: HradRunner | None = None
        self.sampled_from: dict[int, Sequence[Distribution | None]] = {}  # of the last drafts, by row
        self._vocab_sample = _vocab_sample(vllm_config) if self._is_output_rank else b""
        self.num_pads = 0  # that vLLM has verified, or rather rejected
        settings = read_settings(compat.own_config(vllm_config))
        if settings.runner == "v2":
            compat.check_runner(vllm_config)
        self.configure(settings)
        self._stats_file: StatsFile | None = None
        if self._is_output_rank:
            compat.wrap_runners()
            self._stats_file = open_stats_file(
                lambda: (compat.model_name(vllm_config), compat.engine_index(vllm_config))
            )
        self._show()

    def configure(self, settings: ProposerSettings) -> None:
        """Take other settings from now on; wrong ones raise, and the old ones stay. The same ones change nothing.

        The proposers of all workers must get them at the same time.
        """
        options = settings.client_options(self._most, compat.vocab_len(self._vllm_config), self._vocab_sample)
        if settings == self._settings:
            return
        self._foresee_with(settings)
        if self._client is not None:
            self._client.close()
        self._settings = settings
        self._gate = self._gate_for(settings) if settings.is_gated else None
        self._decided = {}
        # Without a planner there is nothing to ask for.
        self._client = draft_client(options) if self._is_output_rank and options.planner != "none" else None

    def _gate_for(self, settings: ProposerSettings) -> Gate:
        """The gate of these settings. Those that come back need not learn again what pays."""
        if len(self._gates) > _MAX_GATES:
            self._gates.clear()
        gate = self._gates.setdefault(repr(settings), Gate())
        gate.interrupt()
        return gate

    @property
    def is_on(self) -> bool:
        """Whether this worker drafts at all: it is the one that asks, and has a planner to ask for."""
        return self._client is not None

    @property
    def uses_rejection(self) -> bool:
        """Whether draft tokens of sampled rows may be drawn by chance; on all ranks the same."""
        settings = self._settings
        return settings is not None and settings.rule != "match" and settings.planner != "none"

    @property
    def feature_hook(self) -> hidden_states.FeatureHook | None:
        """The hook that records each step's features; None without a trained predictor."""
        return self._foresight.feature_hook if self._foresight else None

    def counts(self) -> dict[str, float]:
        """Counters of the client and of the predictor since the settings last changed."""
        foreseen = asdict(self._foresight.counts) if self._foresight else {}
        return self._client.counts.as_dict() | foreseen if self._client else {}

    def on_step_scheduled(self, model_runner: Any, news: compat.StepInfo) -> None:
        """The runner that calls us is about to run a step with this news; vLLM's hook tells neither. Never raises.

        The draft prefills new prompts at the same time, and so has a draft ready after the first token. vLLM counts
        pads as draft tokens.
        """
        self._runner = model_runner
        self.num_pads += news.num_pads
        self._limits.end(news.ended)
        self._limits.begin(news.limits)
        if news.prompts and self._client is not None and (self._gate is None or self._gate.was_open):
            self._client.announce_prompts(news.prompts)

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The target is loaded; a trained predictor that does not fit it stops vLLM here."""
        compat.patch_cpu_sampler()
        self._model = model
        if self._hrad is not None:
            self._foresight = self._foresight_on(self._hrad)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: _Array,
        token_ids_cpu: _Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every row of the batch; vLLM's V1 runner, which calls this, verifies all of them as certain.

        Where vLLM gains by it, all rows are filled up with pads, also when nothing is drafted.
        """
        texts = {
            index: token_ids_cpu[index, : int(num_tokens_no_spec[index])]
            for index, sampled in enumerate(sampled_token_ids)
            if len(sampled)
        }
        drafts = self.draft_rows(sampled_token_ids, texts, {})
        return self._padded(drafts) if self._can_pad(texts, len(drafts)) else drafts

    def draft_rows(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        texts: Mapping[int, _Array],
        samplings: Mapping[int, RequestSampling],
    ) -> list[list[int]]:
        """Drafts for every row after a step that sampled these tokens; `texts` are those of the rows that sampled any.

        `samplings`: how rows sample that are verified by what their draft tokens are drawn from (`sampled_from`).
        Empty for rows in chunked prefill, without a draft, or at their end. Rows with a LoRA adapter or with images get
        none: the draft model knows neither, so the service is not asked. Nor is it for requests that want none, and for
        those that are sampled with a seed (`runner.is_seeded`).
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        self.sampled_from = {}
        had_asked, self._has_asked = self._has_asked, False
        if self._client is None or not texts:
            return drafts
        num_new = [len(sampled) for sampled in sampled_token_ids]
        step_s = self._pace.step_s(num_new, [len(text) for text in texts.values()])
        if self._is_worthwhile(num_new, step_s):
            names = compat.row_names(self._runner, len(drafts))
            asked = self._without_aside(list(texts), names)
            hints = self._foresight.predict(sampled_token_ids, asked) if self._foresight else {}
            recurring = self._rows_with_recurring_noise(len(drafts))
            committed = {
                index: SequenceUpdate(
                    texts[index],
                    num_new[index],
                    hint=hints.get(index),
                    name=names[index],
                    sampling=samplings.get(index),
                    max_draft_tokens=self._limits.max_draft_tokens(names[index]),
                    has_recurring_noise=index in recurring,
                )
                for index in asked
            }
            # Since the last question there was one step, and it decoded just these rows.
            is_pure_decode_step = had_asked and len(committed) == len(drafts)
            self._has_asked = bool(committed)
            for index, draft in self._ask(committed, step_s if is_pure_decode_step else None).items():
                drafts[index] = draft
        self._had_drafts = any(drafts)
        self._show()
        return drafts

    def _can_pad(self, texts: Mapping[int, _Array], num_rows: int) -> bool:
        """Whether to fill up all rows: they must then be equal, and few enough for tokens to be cheap."""
        if self._runner is None or self._settings is None or self._settings.pad == "off":
            return False
        if not texts or len(texts) < num_rows or num_rows * (1 + self._most) > _MAX_PADDED:
            return False
        # vLLM adds one token of its own after the draft; both must fit.
        if self._max_model_len - max(map(len, texts.values())) - 1 < self._most:
            return False
        if self._settings.pad == "auto" and not compat.has_graphs_for_equal_rows(self._vllm_config):
            return False
        return compat.allows_pads(self._runner)

    def _padded(self, drafts: Sequence[list[int]]) -> list[list[int]]:
        return [draft + [compat.PAD] * (self._most - len(draft)) for draft in drafts]

    def _foresee_with(self, settings: ProposerSettings) -> None:
        """Load the trained predictor of these settings, if they name one; one that does not fit raises."""
        hrad, foresight = None, None
        if settings.trained_predictor is not None:
            hrad = read_hrad(settings.trained_predictor)
            hidden_states.check_features(self._vllm_config, hrad.card.num_layers, hrad.card.hidden_len)
            if self._model is not None:
                foresight = self._foresight_on(hrad)
        if self._foresight is not None:
            self._foresight.feature_hook.close()
        self._hrad, self._foresight = hrad, foresight

    def _foresight_on(self, hrad: Hrad) -> HradRunner | None:
        """H-RAD on the loaded target; other ranks only contribute their shard of the embeddings."""
        if self._embed is None:
            self._embed = hidden_states.embedder(self._vllm_config, self._model, is_kept=self._is_output_rank)
        if not self._is_output_rank:
            return None
        return HradRunner(hrad, hidden_states.FeatureHook(self._model, hrad.card.num_layers, self._embed))

    def _is_worthwhile(self, num_new: Sequence[int], step_s: float | None) -> bool:
        """Report the last step to the gate, and ask it about the next one."""
        if self._gate is None:
            return True
        if step_s is not None:
            self._gate.observe(len(num_new), sum(num_new), step_s, self._had_drafts)
            self._say_decisions(self._gate.decisions)
        return self._gate.is_open(len(num_new))

    def _say_decisions(self, decisions: Mapping[int, Decision]) -> None:
        """Log what the gate has decided, where that is new; at most once in hundreds of steps."""
        for max_rows, decision in decisions.items():
            if self._decided.get(max_rows) is decision.is_open:
                continue
            self._decided[max_rows] = decision.is_open
            log.info(
                "specbranch: with %s requests at once %.1f tokens/s with drafts, %.1f without: drafts are %s, next "
                "comparison after %d steps",
                decision.rows,
                decision.drafted,
                decision.plain,
                "on" if decision.is_open else "off",
                decision.num_steps,
            )

    def _without_aside(self, rows: Sequence[int], names: Sequence[str | None]) -> Sequence[int]:
        if self._runner is None:
            return rows
        aside = {
            **compat.undraftable_rows(self._runner, len(names)),
            **dict.fromkeys(self._limits.rows_without_drafts(names), "request"),
        }
        self._asides.update(aside[index] for index in rows if index in aside)
        if "seed" in aside.values():
            _say_of_seeds()
        return [index for index in rows if index not in aside]

    def _rows_with_recurring_noise(self, num_rows: int) -> Collection[int]:
        """Find the sampled rows of a target that shares its namespace.

        vLLM starts its random numbers with the same engine seed in every process, so others of that name, and itself
        after a restart, may draw the same ones.
        """
        if self._settings is None or self._settings.namespace is None:
            return ()
        return range(num_rows) if self._runner is None else compat.sampled_rows(self._runner, num_rows)

    def _ask(self, rows: Mapping[int, SequenceUpdate], step_s: float | None) -> dict[int, list[int]]:
        """The drafts of these rows, cut to the length that vLLM can take.

        `step_s` is the time of the last step if it decoded just these.
        """
        if not rows:
            return {}
        assert self._client is not None, "only called with a client"
        drafts: dict[int, list[int]] = {}
        for (index, row), found in zip(rows.items(), self._client.propose(list(rows.values()), step_s), strict=True):
            draft, sampled_from = found.tokens, found.sampled_from
            # vLLM adds one token of its own after the draft; both must fit.
            room = self._max_model_len - len(row.tokens) - 1
            drafts[index] = draft[: max(0, min(self._most, room))]
            if any(sampled_from[: len(drafts[index])]):
                self.sampled_from[index] = sampled_from[: len(drafts[index])]
            self._lens[len(drafts[index])] += 1
        return drafts

    def _show(self) -> None:
        """Pass the counters to the process of vLLM's metrics endpoint."""
        if self._stats_file is None or self._settings is None:
            return
        client, gate = self._client, self._gate
        self._stats_file.publish(
            PublishedStats(
                model=self._stats_file.model,
                engine=self._stats_file.engine,
                address=self._settings.address,
                keys=self._settings.keys,
                namespace=client.namespace if client else b"",
                is_lagging=client.is_lagging if client else False,
                is_closed=gate is not None and not gate.was_open,
                vocab_mismatch=client.vocab_mismatch if client else False,
                counts=self.counts(),
                lens=self._lens,
                asides=dict(self._asides),
                gate=list(gate.decisions.values()) if gate else [],
            )
        )


@functools.cache
def _say_of_seeds() -> None:
    log.info(
        "specbranch: sampled requests with a seed get no drafts, so that the seed gives the same text again; leave the "
        "seed out for drafts. Said once"
    )


def _vocab_sample(vllm_config: Any) -> bytes:
    """A sample of the target's tokens; nothing if they cannot be read, and then sizes are compared."""
    try:
        return read_fingerprint(compat.tokenizer(vllm_config))
    except AttributeError:
        return b""
