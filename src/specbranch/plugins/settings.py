"""What every target tells its draft client: where the service is, how long to wait for it, how it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from specbranch.core.planners import DEFAULT_PLANNER, SettingError, make_planner, setting_names, suggest
from specbranch.core.planners.predictors import CONSTANTS
from specbranch.engines.models import local_model
from specbranch.extensions import load_planners
from specbranch.hrad.network import read_card
from specbranch.service.client import ClientOptions
from specbranch.service.endpoint import ClientKeys, default_address
from specbranch.service.wire import MAX_WAIT_MS

_STEP_SHARE = 0.5  # of a step of the target, for an answer that must be asked for; most are there before


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Where the draft service is, how long a step may wait for it, and how it drafts for this target.

    `address` may be a list, of services with the same draft and the same keys: they share the load.
    `keys` is a directory with `client.key_secret` and `service.key`, needed for TCP. Targets with the same `namespace`
    share drafts for equal sequences. `is_gated`: no drafts at loads where they were measured not to pay.
    `predictor` is a name, or the directory of a trained predictor: a path, or below $SPECBRANCH_MODELS.
    """

    address: str | list[str] = field(default_factory=default_address)
    planner: str = DEFAULT_PLANNER
    settings: dict[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    deadline_ms: Annotated[float, Meta(ge=0, le=MAX_WAIT_MS)] = 100.0
    namespace: str | None = None
    keys: str | None = None
    is_gated: bool = True

    @property
    def trained_predictor(self) -> Path | None:
        """The directory of a trained predictor, if one was chosen."""
        return None if self.predictor in CONSTANTS else local_model(self.predictor) or Path(self.predictor)

    def client_options(self, gamma: int, vocab_len: int | None = None, vocab_sample: bytes = b"") -> ClientOptions:
        """Options for the client; `gamma` is the most draft tokens per step, unless the settings name another number.

        `vocab_len` and `vocab_sample` are the target's; a caller that only checks the settings has none.
        """
        load_planners()
        settings = dict(self.settings)
        if "gamma" in setting_names(self.planner):
            settings.setdefault("gamma", gamma)
        planner = make_planner(self.planner, settings, CONSTANTS["confidence"])  # raises for what would be refused
        trained = self.trained_predictor
        if trained is not None and not trained.is_dir():
            hint = suggest(self.predictor, list(CONSTANTS))
            raise SettingError(f"no predictor is called {self.predictor!r}, nor a directory with a trained one; {hint}")
        if trained is not None and planner.asks_predictor:
            _refuse_window(trained, settings.get("gamma", gamma))
        return ClientOptions(
            address=self.address,
            planner=self.planner,
            settings=settings,
            predictor="hrad" if trained else self.predictor,
            deadline_s=self.deadline_ms / 1000,
            step_share=None if planner.lets_wait else _STEP_SHARE,
            namespace=self.namespace.encode(errors="surrogatepass") if self.namespace else None,
            keys=client_keys(self.keys),
            vocab_len=vocab_len,
            vocab_sample=vocab_sample,
        )


def _refuse_window(directory: Path, gamma: int) -> None:
    """Raise if a predictor was trained for windows of another length: its "all" would not mean all of gamma tokens."""
    window = read_card(directory).window
    if window != gamma:
        raise SettingError(
            f"the predictor in {directory} was trained for windows of {window} draft tokens, and gamma is {gamma}; "
            f"set gamma to {window}, or train it again with `specbranch train fit --window {gamma}`"
        )


def client_keys(directory: str | None) -> ClientKeys | None:
    """The client's part of a directory of keys."""
    if directory is None:
        return None
    return ClientKeys(Path(directory) / "client.key_secret", Path(directory) / "service.key")
