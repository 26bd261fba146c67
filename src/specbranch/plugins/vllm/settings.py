"""Settings of the vLLM plugin, the arguments that carry them, limits of single requests, and layouts of the target.

This module does not import vLLM, so that a caller can prepare the arguments before vLLM is imported.

A request limits its drafts in its sampling parameters' `extra_args`, over HTTP in `vllm_xargs`:
`{"specbranch_gamma": 4}`. With 0, it gets no drafts.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from specbranch.core.planners import SettingError, suggest
from specbranch.errors import FlagError, SpecBranchError
from specbranch.plugins.vllm import installed
from specbranch.service.client.interface import DraftSettings

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, to share its level and format

PADS = ("auto", "on", "off")
RUNNERS = ("v1", "v2", "auto")
RULES = ("match", "auto")
METHOD = "custom_class"  # of `speculative_config`: vLLM's hook for proposers like ours
PROPOSER = "specbranch.plugins.vllm.SpecBranchProposer"
SECTION = "specbranch"  # our key in vLLM's `additional_config`
KEY = "specbranch_gamma"
# Environment variables for settings that our section does not name.
ADDRESS, KEYS, ENABLED = "SPECBRANCH_ADDRESS", "SPECBRANCH_KEYS", "SPECBRANCH_ENABLED"
_HYBRID_SINCE = (0, 32)  # the first vLLM without reports of wrong answers of hybrid targets with drafts
_ONE_PROCESS = "uni"
_EVERY_RANK = "external_launcher"


class RunnerError(SpecBranchError, ValueError):
    """The requested model runner of vLLM cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings(DraftSettings):
    """The draft settings of any target, and those for vLLM alone.

    `pad`: pad the drafts of all rows to the same length, so that vLLM can use its CUDA graphs; `auto` does so where
    vLLM has such graphs. `runner` is vLLM's model runner: `v2` has not been run on a GPU, and `auto` leaves the choice
    to vLLM. `rule`: with `match`, the draft proposes its likeliest tokens, and the target keeps those that it samples
    itself; with `auto`, the draft tokens of sampled requests are sampled too, and verified by their probabilities,
    which is experimental and for vLLM's V2 runner only.
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
    """Return the settings in our section of `additional_config`.

    Raise `SettingError` for an unknown name, a wrong value, or a section that is not a mapping.
    """
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


def plugin_settings(section: Any, environment: Mapping[str, str]) -> ProposerSettings:
    """Return the settings of the plugin: those of our section, and where it names no value, the environment's.

    `SPECBRANCH_ADDRESS` may name several services, separated by commas, and `SPECBRANCH_KEYS` a directory. With
    `SPECBRANCH_ENABLED=0` nothing is drafted and no service is contacted. An empty variable counts as unset. Raise
    `SettingError` for a wrong value.
    """
    if isinstance(section, Mapping):
        found = {"address": _addresses(environment.get(ADDRESS, "")), "keys": environment.get(KEYS)}
        section = {**{name: value for name, value in found.items() if value}, **section}
    settings = read_settings(section)
    switch = environment.get(ENABLED) or "1"
    if switch not in ("0", "1"):
        raise SettingError(f"{ENABLED} is {switch!r}; it takes 0 or 1")
    if switch == "1":
        return settings
    _log_disabled()
    return ProposerSettings(address=None, planner="none", is_gated=False, pad="off", runner=settings.runner)


def _addresses(text: str) -> str | list[str] | None:
    """Return the one address in a text, a list of several that commas separate, or None for an empty text."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    return found if len(found) > 1 else next(iter(found), None)


@functools.cache
def _log_disabled() -> None:
    log.info("%s is 0: specbranch drafts nothing and contacts no draft service", ENABLED)


def merged_settings(ours: Mapping[str, Any], additional_config: Any) -> ProposerSettings:
    """Return a command's settings (`ours`) with the user's `additional_config`; raise `FlagError` if both set a key."""
    theirs = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else additional_config
    if not isinstance(theirs, Mapping):
        raise FlagError(f"--additional-config has {theirs!r} for '{SECTION}'; give a table of settings")
    for key in theirs:
        if key in ours:
            raise FlagError(f"--additional-config sets {SECTION}.{key}, which this command sets; leave one out")
    return read_settings({**theirs, **ours})


def proposer_arguments(settings: ProposerSettings, num_speculative_tokens: int = 8) -> dict[str, Any]:
    """Return arguments for `vllm.LLM(model, **arguments)`: `speculative_config` and `additional_config`.

    `num_speculative_tokens` is the maximum of draft tokens that vLLM verifies per sequence and step.
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
    """Return the settings by name, without those that are None by default; an address of None is kept."""
    return {name: value for name, value in asdict(settings).items() if value is not None or name == "address"}


def limit_of(sampling_params: Any) -> int | None:
    """Return the maximum of draft tokens that a request sets for itself; None if it sets no valid number."""
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


class TargetError(SpecBranchError, ValueError):
    """Drafts cannot be used with this target model."""


class LayoutError(SpecBranchError, ValueError):
    """Drafts are impossible with a parallel layout of vLLM, or would change its output; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How vLLM spreads a target: the sizes of its parallel groups, and its executor (None if vLLM chooses it).

    `data` counts data-parallel engines on this machine. A group of tensor and pipeline ranks may span nodes.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    num_nodes: int = 1
    executor: str | None = None

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> ParallelLayout:
        """Return the layout that arguments of `vllm.LLM` describe."""
        return cls(
            tensor=_size(arguments, "tensor_parallel_size"),
            pipeline=_size(arguments, "pipeline_parallel_size"),
            data=_size(arguments, "data_parallel_size"),
            num_nodes=_size(arguments, "nnodes"),
            executor=arguments.get("distributed_executor_backend"),
        )

    @property
    def num_devices(self) -> int:
        """The number of devices that the target uses on this machine; vLLM starts one worker for each."""
        return max(1, self.tensor * self.pipeline // self.num_nodes) * self.data

    @property
    def in_one_process(self) -> bool:
        """Whether vLLM runs the model in the process of its engine and starts no worker processes."""
        return self.num_devices == 1 and self.executor in (None, _ONE_PROCESS)

    def check_supported(self) -> None:
        """Raise `LayoutError` if drafts cannot be used with this layout."""
        if self.pipeline > 1:
            raise LayoutError(
                f"pipeline parallelism ({self.pipeline} stages) cannot be combined with drafts: vLLM's first stage "
                "fails without a proposer, and its scheduler would verify drafts against the wrong tokens. Use "
                "tensor parallelism (--tensor-parallel-size), or run vLLM alone (serve --bare)"
            )
        if self.executor == _EVERY_RANK and self.tensor > 1:
            raise LayoutError(
                f"the executor {_EVERY_RANK} runs a scheduler in each of the {self.tensor} ranks, and only one of them "
                "would get drafts: their outputs would diverge. Use the executor mp or ray, or run vLLM "
                "alone (serve --bare)"
            )
        if self.executor == _ONE_PROCESS and self.tensor > 1:
            raise LayoutError(
                f"{self.tensor} workers cannot run in one process (executor {_ONE_PROCESS}); leave the executor to "
                "vLLM, or use one worker"
            )


def check_target(vllm_config: Any) -> None:
    """Raise `TargetError` for a hybrid target where vLLM was seen, or is reported, to answer wrongly with drafts.

    Its recurrent layers keep a state that vLLM must take back where draft tokens are rejected. Warn elsewhere.
    """
    model = vllm_config.model_config
    if not getattr(model, "is_hybrid", False):
        return
    way_out = "run vLLM alone (serve --bare), or choose a target with attention in every layer"
    if vllm_config.device_config.device_type == "cpu":
        raise TargetError(
            f"{model.model} has recurrent layers, and on a CPU vLLM takes their state back wrongly after draft tokens: "
            f"answers were wrong, or the engine ended, also with another proposer; {way_out}"
        )
    version = installed.version()
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _HYBRID_SINCE:
        raise TargetError(
            f"{model.model} has recurrent layers, and vLLM {version} is reported to answer wrongly with "
            f"drafts for such a model; use vLLM 0.32, {way_out}"
        )
    log.warning(
        "%s has recurrent layers: drafts are untested with it; compare its answers with serve --bare", model.model
    )


def _size(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name)
    if value is None:
        return 1
    if not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name} is {value!r}; give a whole number of at least 1")
    return value
