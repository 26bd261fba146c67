"""Get drafts for the rows of vLLM's batches, for either runner: gate, draft client, trained predictor, and counters.

This module knows rows (`compat.BatchRow`) and nothing of a runner. vLLM's batches change their order and do not say
that a request has ended. Neither matters, because the service finds sessions by their tokens.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specbranch.core.round import Draft
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.compat import BatchRow, StepInfo
from specbranch.plugins.vllm.hidden_states import TrainedPredictor
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.plugins.vllm.stats_file import StatsPublisher, open_stats_file
from specbranch.service.client.gate import Decision, Gate, StepTimer
from specbranch.service.client.interface import DraftSource, SequenceUpdate
from specbranch.service.client.pool import draft_client

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, to share its level and format

_MAX_GATES = 64


class BatchDrafter:
    """Gets drafts for the rows of each step.

    Every worker creates an instance; only the worker whose drafts vLLM uses has a client of the draft service.
    """

    def __init__(self, vllm_config: Any, settings: ProposerSettings) -> None:
        compat.layout(vllm_config).check_supported()  # before any weights are loaded
        compat.warn_if_untested()
        self._vllm_config = vllm_config
        self._max_model_len = compat.max_model_len(vllm_config)
        self.max_draft_tokens = compat.num_speculative_tokens(vllm_config)
        self.is_output_rank = compat.is_output_rank()
        self._client: DraftSource | None = None
        self._gate = SettingsGate()
        self._timer = StepTimer(time.monotonic)
        self._had_drafts = False  # in the last step
        self._was_asked = False  # whether the client was asked in the last step
        self._limits: dict[str, int] = {}  # the most draft tokens of running requests that named a number
        self._vocab_sample = _vocab_sample(vllm_config) if self.is_output_rank else b""
        self.predictor = TrainedPredictor(vllm_config, self.is_output_rank)
        self._use(settings)
        stats_file = None
        if self.is_output_rank:
            stats_file = open_stats_file(lambda: (compat.model_name(vllm_config), compat.engine_index(vllm_config)))
        self._stats = StatsPublisher(stats_file, self.max_draft_tokens)
        if stats_file is not None:
            self._publish()

    @property
    def is_on(self) -> bool:
        """Whether this worker asks for drafts: vLLM uses its drafts, and the planner is not `none`."""
        return self._client is not None

    @property
    def uses_rejection(self) -> bool:
        """Whether draft tokens of sampled rows may be sampled, for rejection sampling; the same on all ranks."""
        return self.settings.rule != "match" and self.settings.planner != "none"

    def configure(self, settings: ProposerSettings) -> None:
        """Replace the settings; if the new ones are wrong, raise and keep the old ones. Equal settings change nothing.

        The workers of all ranks must be given new settings at the same time.
        """
        if settings != self.settings:
            self._use(settings)

    def counts(self) -> dict[str, float]:
        """Return the counters of client and predictor by name, since the settings last changed; {} without a client."""
        return self._client.counts.as_dict() | self.predictor.counts() if self._client else {}

    def on_step_scheduled(self, news: StepInfo) -> None:
        """Store the draft limits of a step's new requests, and announce its prompts to the draft service. Never raise.

        It is called before the step runs, so that the draft model prefills the prompts at the same time as the target
        and has drafts after the first token.
        """
        for name in news.ended if self._limits else ():
            self._limits.pop(name, None)
        self._limits.update(news.limits)
        if news.prompts and self._client is not None and self._gate.was_open:
            self._client.announce_prompts(news.prompts)

    def propose(self, rows: Sequence[BatchRow]) -> list[Draft]:
        """Return a draft for every row after a step, none longer than vLLM can take.

        Rows in chunked prefill, rows at their maximum length, and rows for which no draft is requested get an empty
        draft.
        """
        was_asked, self._was_asked = self._was_asked, False
        drafts = [Draft([]) for _ in rows]
        if self._client is None or not any(row.num_new for row in rows):
            return drafts
        num_new = [row.num_new for row in rows]
        step_s = self._timer.step_s(num_new, [len(row.tokens) for row in rows if row.num_new])
        gate = self._gate.present
        if gate is None or self._gate.is_worthwhile(gate, num_new, step_s, self._had_drafts):
            updates = self._updates(rows)
            self._was_asked = bool(updates)
            # One step ran since the client was last asked, and it decoded these rows only.
            is_pure_decode_step = was_asked and len(updates) == len(rows)
            asked = list(updates.values())
            found = self._client.propose(asked, step_s if is_pure_decode_step else None) if asked else []
            for index, draft in zip(updates, found, strict=True):
                # vLLM adds one token of its own after the draft; both must fit.
                room = min(self.max_draft_tokens, max(self._max_model_len - len(rows[index].tokens) - 1, 0))
                if len(draft.tokens) > room:
                    draft = Draft(draft.tokens[:room], draft.sampled_from[:room])
                self._stats.lens[len(draft.tokens)] += 1
                drafts[index] = draft
        self._had_drafts = any(draft.tokens for draft in drafts)
        if self._stats.file is not None:
            self._publish()
        return drafts

    def _use(self, settings: ProposerSettings) -> None:
        vocab_len = compat.vocab_len(self._vllm_config)
        options = settings.client_options(self.max_draft_tokens, vocab_len, self._vocab_sample)
        self.predictor.configure(settings.trained_predictor)
        if self._client is not None:
            self._client.close()
        self.settings = settings
        self._gate.configure(settings)
        # Without a planner there is nothing to ask for.
        self._client = draft_client(options) if self.is_output_rank and options.planner != "none" else None

    def _updates(self, rows: Sequence[BatchRow]) -> dict[int, SequenceUpdate]:
        """Return the updates for the client, by row index; count the decoded rows that get no draft, by cause."""
        asked: list[int] = []
        for index, row in enumerate(rows):
            cause = "request" if self._limits and self._limits.get(row.name or "") == 0 else row.skip_cause
            if cause == "seed":
                _log_seeds()
            if cause is None and row.num_new:
                asked.append(index)
            elif row.num_new and cause is not None:
                self._stats.skipped[cause] += 1
        hints = self.predictor.predict(rows, asked) if self.predictor.runner is not None else {}
        # vLLM starts its random numbers with the same engine seed in every process, so other targets of this namespace,
        # and this one after a restart, may draw the same ones.
        is_shared = self.settings.namespace is not None
        return {
            index: SequenceUpdate(
                rows[index].tokens,
                rows[index].num_new,
                hint=hints.get(index),
                name=rows[index].name,
                sampling=rows[index].sampling,
                max_draft_tokens=self._limits.get(rows[index].name or "") if self._limits else None,
                has_recurring_noise=is_shared and rows[index].is_sampled,
            )
            for index in asked
        }

    def _publish(self) -> None:
        """Write the counters to the stats file, which the process of vLLM's metrics endpoint reads."""
        self._stats.publish(self.settings, self._client, self._gate.present, self.counts())


class SettingsGate:
    """Keeps a gate, with its own measurements, for each set of settings used; asks the gate of the current settings.

    A gate switches drafts off at loads where they were measured not to pay.
    """

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}  # by the settings that they are for
        self._logged: dict[int, bool] = {}  # by load: the decision that was logged last
        self.present: Gate | None = None  # None: all steps may have drafts

    @property
    def was_open(self) -> bool:
        """Whether the gate's last answer allowed drafts; True without a gate."""
        return self.present is None or self.present.was_open

    def configure(self, settings: ProposerSettings) -> None:
        """Make the gate of these settings the present one, or use no gate if the settings switch it off."""
        self._logged = {}
        self.present = None
        if settings.is_gated:
            if len(self._gates) > _MAX_GATES:
                self._gates.clear()
            self.present = self._gates.setdefault(repr(settings), Gate())
            self.present.interrupt()

    def is_worthwhile(self, gate: Gate, num_new: Sequence[int], step_s: float | None, had_drafts: bool) -> bool:
        """Report the last step to the gate, and return whether the next one should have drafts.

        `num_new` is the number of new tokens of each row; `step_s` is the time of the step in seconds, None if it
        cannot be compared with that of other steps. `had_drafts`: the step verified drafts.
        """
        if step_s is not None:
            gate.observe(len(num_new), sum(num_new), step_s, had_drafts)
            self.log_decisions(gate.decisions)
        return gate.is_open(len(num_new))

    def log_decisions(self, decisions: Mapping[int, Decision]) -> None:
        """Log each decision that differs from the one logged last for the same load."""
        for max_rows, decision in decisions.items():
            if self._logged.get(max_rows) is decision.is_open:
                continue
            self._logged[max_rows] = decision.is_open
            log.info(
                "specbranch: with %s requests at once %.1f tokens/s with drafts, %.1f without: drafts are %s, next "
                "comparison after %d steps",
                decision.rows,
                decision.drafted,
                decision.plain,
                "on" if decision.is_open else "off",
                decision.num_steps,
            )


@functools.cache
def _log_seeds() -> None:
    log.info(
        "specbranch: sampled requests with a seed get no drafts, so that the seed gives the same text again; leave the "
        "seed out for drafts. Said once"
    )


def _vocab_sample(vllm_config: Any) -> bytes:
    """Return a fingerprint of the target's vocabulary; b"" if it cannot be read, and then only sizes are compared."""
    try:
        return read_fingerprint(compat.tokenizer(vllm_config))
    except AttributeError:
        return b""
