"""Settings of the vLLM proposer: the `specbranch` section of vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from specbranch.core.planners import SettingError, suggest
from specbranch.errors import FlagError, SpecBranchError
from specbranch.plugins.vllm.arguments import SECTION
from specbranch.service.client.interface import DraftSettings

PADS = ("auto", "on", "off")
RUNNERS = ("v1", "v2", "auto")
RULES = ("match", "auto")


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
