"""Get drafts for the rows of vLLM's batches, for either runner: gate, draft client, text drafts, predictor, counters.

Rows for which the service gives no answer get a draft by n-gram lookup in their own text and in past answers
(`core/text_drafter.py`): while the service is dead, late, or closed off by the gate, or if the settings name none.

This module knows rows (`compat.BatchRow`) and nothing of a runner. vLLM's batches change their order and do not say
that a request has ended. Neither matters, because the service finds sessions by their tokens.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbranch.core.round import Draft
from specbranch.core.text_drafter import TextDrafter
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.compat import BatchRow, StepInfo
from specbranch.plugins.vllm.hidden_states import TrainedPredictor
from specbranch.plugins.vllm.settings import ProposerSettings, check_target
from specbranch.plugins.vllm.stats_file import StatsPublisher, open_stats_file
from specbranch.service.client.gate import Decision, Gate, StepTimer
from specbranch.service.client.interface import NO_ANSWER, DraftSource, SequenceUpdate
from specbranch.service.client.pool import draft_client

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, to share its level and format

_MAX_GATES = 64
_TEXT_SHARE, _MIN_TEXT_ROWS = 0.05, 16  # of a step's time for text drafts; rows that get one in any case
_SMOOTHING = 0.1  # the weight of the newest step in the time that a row's text draft takes


class BatchDrafter:
    """Gets drafts for the rows of each step, from the draft service and by n-gram lookup in the text.

    Every worker creates an instance; only the worker whose drafts vLLM uses drafts, and has a client of the service.
    """

    def __init__(self, vllm_config: Any, settings: ProposerSettings) -> None:
        compat.layout(vllm_config).check_supported()  # before any weights are loaded
        check_target(vllm_config)
        compat.warn_if_untested()
        self._vllm_config = vllm_config
        self._max_model_len = compat.max_model_len(vllm_config)
        self.max_draft_tokens = compat.num_speculative_tokens(vllm_config)
        self.is_output_rank = compat.is_output_rank()
        self._client: DraftSource | None = None
        self._text: RowTextDrafter | None = None
        self._gate = SettingsGate()
        self._timer = StepTimer(time.monotonic)
        self._last = _LastStep()
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
        """Whether this worker drafts: vLLM uses its drafts, and the planner is not `none`."""
        return self._client is not None or self._text is not None

    @property
    def uses_rejection(self) -> bool:
        """Whether the draft may sample tokens for non-greedy rows, for rejection sampling; the same on all ranks."""
        return self.settings.rule != "match" and self.settings.planner != "none"

    def configure(self, settings: ProposerSettings) -> None:
        """Replace the settings; if the new ones are wrong, raise and keep the old ones. Equal settings change nothing.

        The workers of all ranks must be given new settings at the same time.
        """
        if settings != self.settings:
            self._use(settings)

    def counts(self) -> dict[str, float]:
        """Return the counters of client, predictor and text drafts by name, since the settings last changed.

        Return {} on a worker that does not draft.
        """
        counts = self._client.counts.as_dict() | self.predictor.counts() if self._client is not None else {}
        return counts | self._text.drafter.counts.as_dict() if self._text is not None else counts

    def on_step_scheduled(self, news: StepInfo) -> None:
        """Store the draft limits of a step's new requests, and announce its prompts to the draft service. Never raise.

        It is called before the step runs, so that the draft model prefills the prompts at the same time as the target
        and has drafts after the first token. The state of requests that have ended is discarded.
        """
        for name in news.ended if self._limits else ():
            self._limits.pop(name, None)
        if self._text is not None and news.ended:
            self._text.drafter.forget(news.ended)
        self._limits.update(news.limits)
        if news.prompts and self._client is not None and self._gate.was_open:
            self._client.announce_prompts(news.prompts)

    def propose(self, rows: Sequence[BatchRow]) -> list[Draft]:
        """Return a draft for every row after a step, none longer than vLLM can take.

        Rows in chunked prefill, rows at their maximum length, and rows for which no draft is requested get an empty
        draft.
        """
        last, self._last = self._last, _LastStep()
        drafts = [NO_ANSWER for _ in rows]
        client, text = self._client, self._text
        if (client is None and text is None) or not any(row.num_new for row in rows):
            return drafts
        num_new = [row.num_new for row in rows]
        step_s = self._timer.step_s(num_new, [len(row.tokens) for row in rows if row.num_new])
        gate = self._gate.present
        may_ask = client is not None and (
            gate is None or self._gate.is_worthwhile(gate, num_new, step_s, last.num_submitted > 0)
        )
        if client is not None and last.was_asked and not may_ask:
            client.rest()
        updates = self._updates(rows, may_ask) if may_ask or text is not None else {}
        # vLLM adds one token of its own after the draft; both must fit.
        rooms = [min(self.max_draft_tokens, max(self._max_model_len - len(row.tokens) - 1, 0)) for row in rows]
        if client is not None and may_ask and updates:
            self._last.was_asked = True
            # One step ran since the client was last asked, and it decoded these rows only, without drafts of others.
            is_known_step = last.was_asked and len(updates) == len(rows) and (text is None or not text.num_submitted)
            found = client.propose(list(updates.values()), step_s if is_known_step else None)
            self._last.waited_s = client.waited_s
            for index, draft in zip(updates, found, strict=True):
                if len(draft.tokens) > rooms[index]:
                    draft = Draft(draft.tokens[: rooms[index]], draft.sampled_from[: rooms[index]])
                drafts[index] = draft
        self._last.num_submitted = sum(len(draft.tokens) for draft in drafts)
        if text is not None:
            text.num_submitted, num_submitted = 0, text.num_submitted + last.num_submitted
            if step_s is not None:
                text.drafter.observe_step(len(rows), num_submitted, sum(num_new), max(step_s - last.waited_s, 0.0))
            unanswered = {index: row for index, row in updates.items() if drafts[index] is NO_ANSWER}
            text.fill(drafts, unanswered, rooms, step_s)
        for index in updates:
            self._stats.lens[len(drafts[index].tokens)] += 1
        if self._stats.file is not None:
            self._publish()
        return drafts

    def _use(self, settings: ProposerSettings) -> None:
        text = settings.text_drafter(self.max_draft_tokens)
        options = None
        if settings.address is not None:
            vocab_len = compat.vocab_len(self._vllm_config)
            options = settings.client_options(self.max_draft_tokens, vocab_len, self._vocab_sample)
        self.predictor.configure(settings.trained_predictor)
        if self._client is not None:
            self._client.close()
        self.settings = settings
        self._gate.configure(settings, text is not None)
        # Without a planner there is nothing to ask for.
        is_drafting = self.is_output_rank and settings.planner != "none"
        self._client = draft_client(options) if is_drafting and options is not None else None
        self._text = RowTextDrafter(text) if is_drafting and text is not None else None

    def _updates(self, rows: Sequence[BatchRow], may_ask: bool) -> dict[int, SequenceUpdate]:
        """Return the updates of the rows that may get drafts, by row index; count the other decoded rows, by cause.

        With `may_ask` they get the hints that the draft service needs.
        """
        found: list[int] = []
        for index, row in enumerate(rows):
            cause = "request" if self._limits and self._limits.get(row.name or "") == 0 else row.skip_cause
            if cause == "seed":
                _log_seeds()
            if cause is None and row.num_new:
                found.append(index)
            elif row.num_new and cause is not None:
                self._stats.skipped[cause] += 1
        hints = self.predictor.predict(rows, found) if may_ask and self.predictor.runner is not None else {}
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
            for index in found
        }

    def _publish(self) -> None:
        """Write the counters to the stats file, which the process of vLLM's metrics endpoint reads."""
        self._stats.publish(self.settings, self._client, self._gate.present, self.counts())


@dataclass(slots=True)
class _LastStep:
    """The facts about one step that the next step uses.

    `was_asked`: the draft service was asked for drafts, which took `waited_s` seconds. `num_submitted` of its draft
    tokens are verified in the next step.
    """

    was_asked: bool = False
    waited_s: float = 0.0
    num_submitted: int = 0


class RowTextDrafter:
    """Drafts by n-gram lookup in a row's text and past answers, for rows that got no answer from the service.

    It never raises, and takes about 5 % of a step's time. If that is not enough time for all rows, as in large batches
    on a fast target, the rows take turns, at least 16 in each step.
    """

    def __init__(self, drafter: TextDrafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafter = drafter
        self.num_submitted = 0  # tokens of the drafts that the last call has made
        self._clock = clock
        self._step_s = 0.0  # of the target; 0 if not known
        self._row_s = 0.0  # the time that a row takes here, smoothed
        self._num_rows = 0  # in all calls

    def fill(
        self, drafts: list[Draft], updates: Mapping[int, SequenceUpdate], rooms: Sequence[int], step_s: float | None
    ) -> None:
        """Replace the drafts of these rows, which are empty, by n-gram drafts, if the lookup finds any.

        `rooms`: how many draft tokens each row of the batch can take. Rows without a name get none, because their
        sequence cannot be followed. `step_s` is the time of the target's last step, None if it is not known.
        """
        self._step_s = step_s or self._step_s
        wanting = [index for index, row in updates.items() if row.name and rooms[index]]
        max_rows = max(_MIN_TEXT_ROWS, int(_TEXT_SHARE * self._step_s / self._row_s) if self._row_s else 0)
        if len(wanting) > max_rows:
            first = self._num_rows % len(wanting)
            wanting = [*wanting[first:], *wanting[:first]][:max_rows]
        start_s = self._clock()
        for index in wanting:
            row = updates[index]
            room = rooms[index] if row.max_draft_tokens is None else min(rooms[index], row.max_draft_tokens)
            drafts[index] = Draft(self.drafter.draft(row.name or "", row.tokens, row.num_new, room))
            self.num_submitted += len(drafts[index].tokens)
        self._num_rows += len(wanting)
        if wanting:
            row_s = (self._clock() - start_s) / len(wanting)
            self._row_s += (row_s - self._row_s) * (_SMOOTHING if self._row_s else 1.0)


class SettingsGate:
    """Decides whether to ask the draft service for drafts; keeps one gate for each set of settings that was used.

    A gate has its own measurements, and switches the draft service off at loads where its drafts were measured not to
    pay. N-gram lookup goes on, so a gate compares drafts from the service and n-gram lookup together with drafts from
    n-gram lookup alone.
    """

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}  # by the settings that they are for
        self._logged: dict[int, bool] = {}  # by load: the decision that was logged last
        self._has_text_drafts = False
        self.present: Gate | None = None  # None: all steps may have drafts of the service

    @property
    def was_open(self) -> bool:
        """Whether the gate's last answer allowed drafts of the service; True without a gate."""
        return self.present is None or self.present.was_open

    def configure(self, settings: ProposerSettings, has_text_drafts: bool) -> None:
        """Make the gate of these settings the current one, or use no gate if the settings switch it off.

        `has_text_drafts` is for the log: whether there are n-gram drafts from the text while the gate is closed.
        """
        self._logged = {}
        self._has_text_drafts = has_text_drafts
        self.present = None
        if settings.is_gated:
            if len(self._gates) > _MAX_GATES:
                self._gates.clear()
            self.present = self._gates.setdefault(repr(settings), Gate())
            self.present.interrupt()

    def is_worthwhile(self, gate: Gate, num_new: Sequence[int], step_s: float | None, had_drafts: bool) -> bool:
        """Report the last step to the gate, and return whether to ask the service for drafts for the next one.

        `num_new` is the number of new tokens of each row; `step_s` is the time of the step in seconds, None if it
        cannot be compared with that of other steps. `had_drafts`: the step verified drafts of the service.
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
                "specbranch: with %s requests at once %.1f tokens/s with the draft model, %.1f without: the draft "
                "model is %s%s, next comparison after %d steps",
                decision.rows,
                decision.drafted,
                decision.plain,
                "on" if decision.is_open else "off",
                "; text drafts go on" if self._has_text_drafts and not decision.is_open else "",
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
