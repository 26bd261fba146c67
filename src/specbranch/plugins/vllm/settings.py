"""Settings of the vLLM proposer: the `specbranch` section of vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specbranch.core.planners import DEFAULT_PLANNER, SettingError, make_planner, setting_names, suggest
from specbranch.engines.options import local_model
from specbranch.errors import SpecBranchError
from specbranch.extensions import load_planners
from specbranch.plugins.vllm.arguments import SECTION
from specbranch.plugins.vllm.flags import FlagError
from specbranch.predictor.fixed import CONSTANTS
from specbranch.service.client import ClientOptions
from specbranch.service.endpoint import ClientKeys, default_address

_STEP_SHARE = 0.5  # of a step of the target, for an answer that must be asked for; most are there before
PADS = ("auto", "on", "off")
RUNNERS = ("auto", "v1", "v2")
RULES = ("auto", "match")


class RunnerError(SpecBranchError, ValueError):
    """The model runner that was asked for cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings:
    """Where the draft service is, how long a step may wait for it, and how it drafts for this target.

    `keys` is a directory with `client.key_secret` and `service.key`, needed for TCP. Targets with the same `namespace`
    share drafts for equal sequences. `is_gated`: no drafts at loads where they were measured not to pay. `pad`: fill
    all rows up to the same length, so that vLLM can use its CUDA graphs; `auto` where there are such graphs.
    `predictor` is a name, or the directory of a trained predictor: a path, or below $SPECBRANCH_MODELS.
    `runner` is vLLM's model runner: `auto` leaves it to vLLM. `rule`: with `auto`, draft tokens of sampled requests are
    drawn by chance and tested against their probabilities where vLLM takes these; with `match`, the likeliest are
    proposed and kept as often as the target would say them.
    """

    address: str = field(default_factory=default_address)
    planner: str = DEFAULT_PLANNER
    settings: dict[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    deadline_ms: float = 100.0
    namespace: str | None = None
    keys: str | None = None
    is_gated: bool = True
    pad: str = "auto"
    runner: str = "auto"
    rule: str = "auto"

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise SettingError(f"`runner` is {self.runner!r}; {suggest(str(self.runner), RUNNERS)}")
        if self.rule not in RULES:
            raise SettingError(f"`rule` is {self.rule!r}; {suggest(str(self.rule), RULES)}")

    @property
    def trained_predictor(self) -> Path | None:
        """The directory of a trained predictor, if one was chosen."""
        return None if self.predictor in CONSTANTS else local_model(self.predictor) or Path(self.predictor)

    def client_options(self, gamma: int, vocab_len: int | None = None, vocab_sample: bytes = b"") -> ClientOptions:
        """Options for the client; `gamma` is the most draft tokens per step, unless the settings name another number.

        `vocab_len` and `vocab_sample` are the target's; a caller that only checks the settings has none.
        """
        load_planners()
        if self.pad not in PADS:
            raise SettingError(f"pad is {self.pad!r}; it takes {', '.join(PADS)}")
        settings = dict(self.settings)
        if "gamma" in setting_names(self.planner):
            settings.setdefault("gamma", gamma)
        planner = make_planner(self.planner, settings, CONSTANTS["confidence"])  # raises for what would be refused
        trained = self.trained_predictor
        if trained is not None and not trained.is_dir():
            hint = suggest(self.predictor, list(CONSTANTS))
            raise SettingError(f"no predictor is called {self.predictor!r}, nor a directory with a trained one; {hint}")
        return ClientOptions(
            address=self.address,
            planner=self.planner,
            settings=settings,
            predictor="hrad" if trained else self.predictor,
            deadline_s=self.deadline_ms / 1000,
            step_share=None if planner.lets_wait else _STEP_SHARE,
            namespace=self.namespace.encode() if self.namespace else None,
            keys=client_keys(self.keys),
            vocab_len=vocab_len,
            vocab_sample=vocab_sample,
        )


def read_settings(section: Any) -> ProposerSettings:
    """Settings from our section of `additional_config`; an unknown name raises, with the nearest known one."""
    if not isinstance(section, Mapping):
        raise SettingError(f"additional_config['specbranch'] is {section!r}; give a table of settings")
    known = [one.name for one in fields(ProposerSettings)]
    for key in section:
        if key not in known:
            raise SettingError(f"additional_config['specbranch'] has no setting {key!r}; {suggest(key, known)}")
    return ProposerSettings(**section)


def merged_settings(ours: Mapping[str, Any], additional_config: Any) -> ProposerSettings:
    """The settings that a command gives, and those of the user's own `additional_config`; both may not set the same."""
    theirs = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else additional_config
    if not isinstance(theirs, Mapping):
        raise FlagError(f"--additional-config has {theirs!r} for '{SECTION}'; give a table of settings")
    for key in theirs:
        if key in ours:
            raise FlagError(f"--additional-config sets {SECTION}.{key}, which this command sets; leave one out")
    return read_settings({**theirs, **ours})


def client_keys(directory: str | None) -> ClientKeys | None:
    """The client's part of a directory of keys."""
    if directory is None:
        return None
    return ClientKeys(Path(directory) / "client.key_secret", Path(directory) / "service.key")
