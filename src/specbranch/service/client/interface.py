"""The interface of a source of drafts: its settings and options, the rows that it drafts for, and its counters."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from specbranch.core.distribution import RequestSampling
from specbranch.core.planners import DEFAULT_PLANNER, SettingError, make_planner, setting_names, suggest
from specbranch.core.planners.predictors import CONSTANTS, TRAINED, predictor_names
from specbranch.core.round import AcceptanceHint, Draft
from specbranch.core.text_drafter import TextDrafter, drafts_from_text, make_text_drafter
from specbranch.engines.models import local_model
from specbranch.extensions import load_extensions
from specbranch.hrad.network import read_hrad_card
from specbranch.service.client.discovery import MAX_SERVICES
from specbranch.service.client.sequences import SyncedSequences
from specbranch.service.client.transport import OwnerProcess
from specbranch.service.wire.addresses import ClientKeys, default_address, normalize_addresses
from specbranch.service.wire.messages import MAX_NEW, MAX_SEQUENCE, MAX_STEP_US, MAX_WAIT_MS
from specbranch.service.wire.payloads import Tokens

log = logging.getLogger(__name__)

_STEP_SHARE = 0.5  # of the target's step time: the longest wait for a reply; most drafts were pushed before
_SMOOTHING = 0.1  # the weight of the newest step in the target's step time
_MIN_WAIT_S = 0.005  # a reply takes a fraction of a millisecond on a quiet machine

# The draft of a row that the service gave no answer for, in time or at all. Another empty draft is an answer: the
# service's planner, which also looks the text up, found nothing that pays for its verification.
NO_ANSWER = Draft([])


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """The address of the draft service, the longest wait of a step for it, and how it drafts for this target.

    `address` may be a list of services with the same draft and the same keys, which share the load; dns://NAME:PORT and
    file:///PATH stand for services that may change. Of all of them this target uses `max_services`. With None there is
    no service: drafts come only from n-gram lookup in the text. `keys` is a directory with `client.key_secret` and
    `service.key`, needed for TCP. Targets with the same `namespace` share drafts for equal sequences. `is_gated`: do
    not draft at loads where drafts were measured not to make decoding faster. `predictor`: a predictor's name, or a
    trained one's directory, as a path or relative to $SPECBRANCH_MODELS.
    """

    address: str | list[str] | None = field(default_factory=default_address)
    planner: str = DEFAULT_PLANNER
    settings: dict[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    deadline_ms: Annotated[float, Meta(ge=0, le=MAX_WAIT_MS)] = 100.0
    namespace: str | None = None
    keys: str | None = None
    is_gated: bool = True
    max_services: Annotated[int, Meta(ge=1, le=64)] = MAX_SERVICES

    @property
    def trained_predictor(self) -> Path | None:
        """The directory of the trained predictor; None if `predictor` is the name of a predictor without training."""
        load_extensions()
        return None if self.predictor in predictor_names() else local_model(self.predictor) or Path(self.predictor)

    def checked_settings(self, gamma: int) -> dict[str, Any]:
        """Return the planner's settings, with `gamma` unless they name another number; raise if anything is wrong.

        `gamma` is the maximum of draft tokens per step.
        """
        load_extensions()
        settings = dict(self.settings)
        if "gamma" in setting_names(self.planner):
            settings.setdefault("gamma", gamma)
        planner = make_planner(self.planner, settings, CONSTANTS["confidence"])  # raises if the service would refuse it
        trained = self.trained_predictor
        if trained is not None and not trained.is_dir():
            hint = suggest(self.predictor, predictor_names())
            raise SettingError(f"no predictor is called {self.predictor!r}, nor a directory with a trained one; {hint}")
        if trained is not None and planner.asks_predictor:
            _check_window(trained, settings.get("gamma", gamma))
        if self.address is None and self.planner != "none" and not drafts_from_text(planner):
            raise SettingError(
                f"without a draft model drafts come from the text, and planner {self.planner!r} with these settings "
                f"makes none; name a draft, or use planner {DEFAULT_PLANNER!r} with uses_text or uses_memory"
            )
        return settings

    def client_options(self, gamma: int, vocab_len: int | None = None, vocab_sample: bytes = b"") -> ClientOptions:
        """Return the options of a draft client with these settings; raise if the settings are wrong or name no service.

        `gamma` is the maximum of draft tokens per step, unless the settings name another number. `vocab_len` and
        `vocab_sample` are the target's.
        """
        settings = self.checked_settings(gamma)
        if self.address is None:
            raise SettingError("the settings name no draft service: their address is None")
        planner = make_planner(self.planner, settings, CONSTANTS["confidence"])
        return ClientOptions(
            address=self.address,
            planner=self.planner,
            settings=settings,
            predictor=TRAINED if self.trained_predictor else self.predictor,
            deadline_s=self.deadline_ms / 1000,
            step_share=None if planner.may_block_target else _STEP_SHARE,
            namespace=self.namespace.encode(errors="surrogatepass") if self.namespace else None,
            keys=client_keys(self.keys),
            vocab_len=vocab_len,
            vocab_fingerprint=vocab_sample,
            max_services=self.max_services,
        )

    def text_drafter(self, gamma: int) -> TextDrafter | None:
        """Return a drafter for this process that drafts by n-gram lookup; None if the planner makes no such drafts.

        Raise if the settings are wrong. `gamma` is as for `client_options`.
        """
        return make_text_drafter(self.planner, self.checked_settings(gamma), _log_text_fault)


def _log_text_fault() -> None:
    log.exception("drafting from the text failed; such rows go without drafts. Logged once")


def _check_window(directory: Path, gamma: int) -> None:
    """Raise if the predictor in `directory` was trained for windows of another length than `gamma`.

    The prediction "all" would then not mean that all `gamma` draft tokens are accepted.
    """
    window = read_hrad_card(directory).window
    if window != gamma:
        raise SettingError(
            f"the predictor in {directory} was trained for windows of {window} draft tokens, and gamma is {gamma}; "
            f"set gamma to {window}, or train it again with `specbranch train fit --window {gamma}`"
        )


def client_keys(directory: str | None) -> ClientKeys | None:
    """Return the paths of a client's key files in a directory; None without a directory."""
    if directory is None:
        return None
    return ClientKeys(Path(directory) / "client.key_secret", Path(directory) / "service.key")


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """One sequence after an engine step: all its tokens, how many are new, and how many draft tokens were verified.

    An engine that does not know `num_submitted` may leave it out: then it is the length of the client's last draft.
    `hint` predicts how many of the next draft tokens the target accepts. `name` is the engine's own name for the
    sequence: while the sequence under a name only grows, a call handles only the tokens since the last one. `sampling`
    has the request's sampling parameters: the draft may then sample its tokens too, and the engine verifies them by
    rejection sampling with `Draft.sampled_from`. This needs a `name`; without a seed the sequence gets a random seed.
    `max_draft_tokens` is the longest draft that the engine wants. `has_recurring_noise`: the engine may draw the same
    random numbers again, for example from a seed, so the tokens must not help to draft another sequence.
    """

    tokens: Tokens
    num_new: int
    num_submitted: int | None = None
    hint: AcceptanceHint | None = None
    name: str | None = None
    sampling: RequestSampling | None = None
    max_draft_tokens: int | None = None
    has_recurring_noise: bool = False


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The address of the service, the longest wait for it, and the planner that it uses for this target.

    `address` may be a list, of services with the same draft and the same keys, and may name services that change
    (`pool.draft_client`); the client uses at most `max_services` of them. Clients with the same `namespace` share
    drafts for equal sequences; without it the client makes a random one. `step_share` bounds the wait for a reply to
    this part of the target's step time, as known from `propose`, and never above `deadline_s`; it is None for planners
    that let the target wait on purpose. `vocab_len` is the number of the target's tokens. An engine fails at a larger
    token id, so drafts are cut before it; without `vocab_len` the caller has to cut them. `vocab_fingerprint` is that
    of the target's tokens (`vocabulary.read_fingerprint`). A draft model with another vocabulary is not used; where a
    side has no fingerprint, sizes are compared.
    """

    address: str | Sequence[str]
    planner: str = DEFAULT_PLANNER
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    deadline_s: float = 0.05
    namespace: bytes | None = None
    keys: ClientKeys | None = None
    vocab_len: int | None = None
    vocab_fingerprint: bytes = b""
    step_share: float | None = None
    max_services: int = MAX_SERVICES


@dataclass(slots=True)
class ClientCounts:
    """Counters of a client: the calls that it served, and the messages and drafts that failed, by cause."""

    calls: int = 0
    answered: int = 0
    timeouts: int = 0
    unreachable: int = 0
    not_waited: int = 0  # calls that sent a step and did not wait for the reply
    late: int = 0
    prefetched: int = 0  # rows whose draft was pushed before their verdict
    sampled: int = 0  # draft tokens sampled from a distribution
    refused: int = 0
    unknown_token: int = 0  # drafts cut before a token that the target does not have
    other_vocab: int = 0  # calls without drafts, because the draft has another vocabulary
    oversized: int = 0  # rows that were not sent: more tokens than a message may have
    faults: int = 0
    opened: int = 0
    rerouted: int = 0  # sequences that moved to another service
    wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name; the proposer publishes them at every step."""
        return dict(zip(self.__slots__, _COUNTS(self), strict=True))


_COUNTS = attrgetter(*ClientCounts.__slots__)


class DraftSource(ABC):
    """Base class of draft sources for one target. One thread at a time may use it; a forked process gets no drafts."""

    def __init__(
        self,
        options: ClientOptions,
        synced: SyncedSequences | None = None,
        counts: ClientCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._namespace = options.namespace or os.urandom(16)
        self._owner = OwnerProcess()
        self._synced = synced or SyncedSequences()
        self._step_s: float | None = None  # of the target, smoothed
        self.waited_s = 0.0  # in the last call of `propose`
        self.counts = counts or ClientCounts()

    @property
    def namespace(self) -> bytes:
        """The namespace that keeps this target's sequences apart from those of other targets."""
        return self._namespace

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the services that are connected."""
        return normalize_addresses(self._options.address)

    @property
    @abstractmethod
    def is_lagging(self) -> bool:
        """Whether every draft service is too slow to reply in time; if so, calls do not wait for replies."""

    @property
    @abstractmethod
    def vocab_mismatch(self) -> bool:
        """Whether the draft has another vocabulary than the target, so that it is not used."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection and drop queued messages."""

    @abstractmethod
    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[Draft] | None:
        """Send the rows and return a draft for each one by time `end_s`; None if no row was sent.

        `step_us` is the time of the target's last step in microseconds, 0 if unknown.
        """

    @abstractmethod
    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        """Send the service prompts that the target begins to prefill, as many as possible until `end_s`."""

    @abstractmethod
    def _rest(self) -> None:
        """Tell every service in use that no drafts are wanted for now."""

    def propose(self, rows: Sequence[SequenceUpdate], step_s: float | None = None) -> list[Draft]:
        """Send the verdicts of a step and return a draft for every row, `NO_ANSWER` if it comes too late. Never raise.

        `step_s` is the time since the last call, if the engine has run one step since then, which decoded these rows
        and nothing else.
        """
        if not self._owner.is_current():
            return [NO_ANSWER for _ in rows]
        self.counts.calls += 1
        start_s = self._clock()
        # The service learns what verifying costs, so what the last call has waited for drafts does not count.
        engine_s = max(step_s - self.waited_s, 0.0) if step_s is not None else 0.0
        end_s = start_s + self._reply_timeout_s(engine_s)
        found = None
        try:
            step_us = int(1e6 * engine_s)
            found = self._propose(rows, end_s, step_us if step_us <= MAX_STEP_US else 0)
        except Exception:
            self.counts.faults += 1
            log.exception("the draft client failed; this step goes without drafts")
        self.waited_s = self._clock() - start_s
        self.counts.wait_s += self.waited_s
        return [NO_ANSWER for _ in rows] if found is None else found

    def announce_prompts(self, prompts: Sequence[Tokens]) -> None:
        """Send the service the sequences that the target begins to prefill, and wait for nothing. Never raise."""
        end_s = self._clock() + self._options.deadline_s
        try:
            if self._owner.is_current():
                self._announce_prompts([prompt for prompt in prompts if len(prompt) <= MAX_SEQUENCE], end_s)
        except Exception:
            self.counts.faults += 1
            log.exception("the draft client failed; prompts will be sent with their first tokens")

    def rest(self) -> None:
        """Tell the service that the target wants no drafts until the next call of `propose`. Wait for nothing.

        The service then leaves its cores and its cache to others. Never raise.
        """
        try:
            if self._owner.is_current():
                self._rest()
        except Exception:
            self.counts.faults += 1
            log.exception("the draft client failed; the draft service is not told to rest")

    def _reply_timeout_s(self, step_s: float) -> float:
        """Return how long the target may wait for a reply, after adding `step_s` to the average of its step times.

        A `step_s` of 0 means that no step was measured.
        """
        if step_s > 0.0:
            self._step_s = step_s if self._step_s is None else self._step_s + _SMOOTHING * (step_s - self._step_s)
        share, max_wait_s = self._options.step_share, self._options.deadline_s
        if share is None or self._step_s is None:
            return max_wait_s
        return min(max(share * self._step_s, _MIN_WAIT_S), max_wait_s)

    def _fits(self, row: SequenceUpdate) -> bool:
        """Return whether a row can be sent: it has new tokens after earlier ones, and keeps the limits of a message.

        Count a row beyond the limits, and log the first one.
        """
        length = len(row.tokens)
        if length > MAX_SEQUENCE or row.num_new > MAX_NEW:
            if not self.counts.oversized:
                log.warning(
                    "a text of %d tokens, %d of them new, is not drafted for: the draft service takes %d, %d of them "
                    "new; further ones are only counted",
                    length,
                    row.num_new,
                    MAX_SEQUENCE,
                    MAX_NEW,
                )
            self.counts.oversized += 1
            return False
        return 0 < row.num_new < length
