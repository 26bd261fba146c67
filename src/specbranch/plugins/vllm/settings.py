"""Settings of the vLLM plugin, the arguments that carry them, and the limits of single requests.

Needs no vLLM, so that a caller can prepare the arguments before vLLM is imported.

A request says so in its sampling parameters' `extra_args`, over HTTP in `vllm_xargs`: `{"specbranch_gamma": 4}`. At 0
it is not drafted for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from specbranch.core.planners import SettingError, suggest
from specbranch.errors import FlagError, SpecBranchError
from specbranch.service.client.interface import DraftSettings

log = logging.getLogger("vllm.specbranch")

PADS = ("auto", "on", "off")
RUNNERS = ("v1", "v2", "auto")
RULES = ("match", "auto")
METHOD = "custom_class"  # of `speculative_config`: vLLM's hook for proposers like ours
PROPOSER = "specbranch.plugins.vllm.SpecBranchProposer"
SECTION = "specbranch"  # our key in vLLM's `additional_config`
KEY = "specbranch_gamma"


class RunnerError(SpecBranchError, ValueError):
    """The model runner that was asked for cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings(DraftSettings):
    """The settings of any target, and those for vLLM alone.

    `pad`: fill all rows up to the same length, so that vLLM can use its CUDA graphs; `auto` where there are such
    graphs. `runner` is vLLM's model runner: `v2` has not been run on a GPU, and `auto` leaves the choice to vLLM.
    `rule`: with `match`, the likeliest tokens are proposed and kept as often as the target would say them; with `auto`,
    draft tokens of sampled requests are drawn by chance and tested against their probabilities, which is experimental
    and for vLLM's V2 runner only.
    """

    pad: str = "auto"
    runner: str = "v1"
    rule: str = "match"

    def __post_init__(self) -> None:
        if self.pad not in PADS:
            raise SettingError(f"pad is {self.pad!r}; it takes {', '.join(PADS)}")
        if self.runner not in RUNNERS:
            raise SettingError(f"`runner` is {self.runner!r}; {suggest(str(self.runner), RUNNERS)}")
        if self.rule not in RULES:
            raise SettingError(f"`rule` is {self.rule!r}; {suggest(str(self.rule), RULES)}")
        if self.rule == "auto" and self.runner == "v1":
            raise SettingError("`rule` 'auto' is for vLLM's Model Runner V2; set `runner` to 'v2', or leave `rule` out")


def read_settings(section: Any) -> ProposerSettings:
    """Settings from our section of `additional_config`; an unknown name raises, with the nearest known one."""
    if not isinstance(section, Mapping):
        raise SettingError(f"additional_config['specbranch'] is {section!r}; give a table of settings")
    known = [one.name for one in fields(ProposerSettings)]
    for key in section:
        if key not in known:
            raise SettingError(f"additional_config['specbranch'] has no setting {key!r}; {suggest(key, known)}")
    try:
        return msgspec.convert(section, ProposerSettings)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a text that is not Unicode
        if isinstance(error.__cause__, SettingError):
            raise error.__cause__ from error
        raise SettingError(f"additional_config['specbranch'] has a wrong value: {error}") from error


def merged_settings(ours: Mapping[str, Any], additional_config: Any) -> ProposerSettings:
    """The settings that a command gives, and those of the user's own `additional_config`; both may not set the same."""
    theirs = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else additional_config
    if not isinstance(theirs, Mapping):
        raise FlagError(f"--additional-config has {theirs!r} for '{SECTION}'; give a table of settings")
    for key in theirs:
        if key in ours:
            raise FlagError(f"--additional-config sets {SECTION}.{key}, which this command sets; leave one out")
    return read_settings({**theirs, **ours})


def proposer_arguments(settings: ProposerSettings, num_speculative_tokens: int = 8) -> dict[str, Any]:
    """Arguments for `vllm.LLM(model, **arguments)`: `speculative_config` and `additional_config`.

    `num_speculative_tokens` is the most draft tokens that vLLM verifies per sequence and step.
    """
    return {
        "speculative_config": {
            "method": METHOD,
            "model": PROPOSER,
            "num_speculative_tokens": num_speculative_tokens,
        },
        "additional_config": {SECTION: settings_table(settings)},
    }


def settings_table(settings: ProposerSettings) -> dict[str, Any]:
    """The settings as plain data, without those that are not set."""
    return {name: value for name, value in asdict(settings).items() if value is not None}


class RequestLimits:
    """The longest submission of each request that named one, by vLLM's id, while the request runs."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def begin(self, limits: Mapping[str, int]) -> None:
        """Take in what new requests ask for."""
        self._longest.update(limits)

    def end(self, names: Iterable[str]) -> None:
        """Forget requests that have ended."""
        if self._longest:
            for name in names:
                self._longest.pop(name, None)

    def max_draft_tokens(self, name: str | None) -> int | None:
        """The most draft tokens that a request takes at once; None if it has not said."""
        return self._longest.get(name) if name is not None else None

    def rows_without_drafts(self, names: Sequence[str | None]) -> list[int]:
        """Rows whose requests want no drafts."""
        return [row for row, name in enumerate(names) if self.max_draft_tokens(name) == 0] if self._longest else []


def limit_of(sampling_params: Any) -> int | None:
    """What a request's parameters say; None if nothing, or nothing that can be read."""
    value = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
    if value is None or value is True:
        return None
    try:
        limit = int(value)
    except (TypeError, ValueError):
        limit = -1
    if limit < 0:
        _warn_of_value()
        return None
    return limit


@functools.cache
def _warn_of_value() -> None:
    log.warning("a request has a %s that is not a whole number of at least 0; it is ignored. Said once", KEY)
