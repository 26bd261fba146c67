"""The options that several commands share, and checks of their values.

Planners and draft engines are plain strings, because other packages can register more of them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specbranch.core.planners import DEFAULT_PLANNER, PLANNERS, draft_length_limit
from specbranch.engines.base import DTYPES
from specbranch.engines.registry import ENGINES
from specbranch.errors import UsageError
from specbranch.launch.draft_process import RemoteDraft
from specbranch.launch.vllm_flags import Flags
from specbranch.service.wire.addresses import normalize_addresses

FLAGS_GO_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}  # pass unknown flags on to vLLM

_WHERE = "a path, a name in $SPECBRANCH_MODELS, or a Hugging Face name"

_TARGET = typer.Argument(metavar="TARGET", help=f"Target model, run by vLLM: {_WHERE}.", show_default=False)
Target = Annotated[str, _TARGET]
OptionalTarget = Annotated[str | None, _TARGET]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=f"Draft model, a GGUF file or a Transformers model: {_WHERE}.", show_default=False
    ),
]
_DRAFT = typer.Option("--draft", metavar="MODEL", help=f"Draft model: {_WHERE}, or a GGUF file.", show_default=False)
Draft = Annotated[str, _DRAFT]
OptionalDraft = Annotated[str | None, _DRAFT]

_DEVICE_HELP = "such as cpu, cuda:1 or mps; what the engine supports."
_AUTO_HELP = "auto is the next GPU that the target does not use, else the CPU."
_ENGINE_HELP = f"{', '.join(ENGINES)}. Default: llamacpp for GGUF files, else torch."
_DTYPE_HELP = f"for the torch engine: {', '.join(DTYPES)}. auto is the fastest type on this CPU."
DraftDevice = Annotated[
    str, typer.Option("--draft-device", metavar="DEVICE", help=f"Device of the draft, {_DEVICE_HELP} {_AUTO_HELP}")
]
DraftEngineName = Annotated[
    str | None, typer.Option("--draft-engine", metavar="ENGINE", help=f"Engine of the draft: {_ENGINE_HELP}")
]
DraftDtype = Annotated[
    str, typer.Option("--draft-dtype", metavar="DTYPE", help=f"Data type of the draft's weights, {_DTYPE_HELP}")
]
DraftArg = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-arg",
        metavar="NAME=VALUE",
        help="Any other option of `specbranch draft`, such as cache-tokens=65536; repeatable.",
    ),
]
DraftAddress = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-address",
        metavar="ADDRESS",
        help="Use a draft service that runs already: ipc://PATH, or tcp://HOST:PORT with --draft-keys. Repeat it to "
        "distribute the requests among several. dns://NAME:PORT and file:///PATH stand for services that may change.",
    ),
]
DraftKeys = Annotated[
    Path | None,
    typer.Option("--draft-keys", metavar="DIR", help="Keys for --draft-address, written by `specbranch keys`."),
]
ServiceAddress = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDRESS",
        help="Where the draft service listens: ipc://PATH, or tcp://HOST:PORT with --keys. Default: the socket that "
        "`specbranch draft` chooses itself.",
        show_default=False,
    ),
]
ServiceKeysDir = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", help="Keys for TCP, written by `specbranch keys`.")
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help=f"Device of the model, {_DEVICE_HELP}")]
Engine = Annotated[str | None, typer.Option("--engine", metavar="ENGINE", help=f"Draft engine: {_ENGINE_HELP}")]
ModelDtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help=f"Data type of the model's weights, {_DTYPE_HELP}")
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="Data type of the target, as vLLM's --dtype takes it.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Threads of the engine. Default: one for each core.")
]
Cores = Annotated[
    str | None, typer.Option("--cores", metavar="CORES", help="CPU cores for this process, such as 1 or 4,5,6.")
]
TargetCores = Annotated[
    str | None,
    typer.Option("--target-cores", metavar="CORES", help="CPU cores of the target, such as 0,1. Default: automatic."),
]
DraftCores = Annotated[
    str | None,
    typer.Option("--draft-cores", metavar="CORES", help="CPU cores of the draft, such as 2,3. Default: automatic."),
]

Planner = Annotated[
    str,
    typer.Option("--planner", metavar="NAME", help=f"Method that decides what to draft: {', '.join(PLANNERS)}."),
]
GAMMA = ("--gamma", "--num-speculative-tokens")
GAMMA_HELP = (
    "Maximum draft length: draft tokens that the target verifies in one step. --num-speculative-tokens is the same."
)
Gamma = Annotated[
    int | None,
    typer.Option(
        *GAMMA,
        metavar="N",
        help=f"{GAMMA_HELP} Default: the planner's own, {draft_length_limit(DEFAULT_PLANNER)} for {DEFAULT_PLANNER}.",
        min=1,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Setting of the planner, such as wait_for_draft=true; repeatable. A wrong key lists the right ones.",
    ),
]
Predictor = Annotated[
    str,
    typer.Option(
        "--predictor",
        metavar="NAME",
        help="What predicts how many draft tokens will be accepted: confidence, none, all, or a directory written by "
        "`specbranch train fit`.",
    ),
]
DeadlineMs = Annotated[
    float, typer.Option("--deadline-ms", metavar="MS", help="Maximum time that a target step waits for drafts.", min=0)
]
VllmArg = Annotated[
    list[str] | None,
    typer.Option(
        "--vllm-arg",
        metavar="KEY=VALUE",
        help="Argument of vllm.LLM, such as max_model_len=1024; repeatable. vLLM's own flags do the same.",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Maximum tokens in one answer.", min=1)]

TimelineFile = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="FILE",
        help="At the end, write what target and draft did and when. `specbranch timeline` and Perfetto read it.",
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Write a trace of verification results and draft distributions. `specbranch simulate --trace` reads it.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document as the last line; other output goes to stderr.")
]

_SET_BY_US = ("listen", "keys", "until-eof")  # options of `specbranch draft` that only the starting command may set
_NEAR = 0.82  # similarity, from 0 to 1, above which a flag counts as a typo of another


def example(command: str) -> str:
    """Return the end of a help text: the heading "Example", and below it the command line `command`."""
    return f"Example:\n\n{command}"


def check_flag_typos(context: typer.Context) -> None:
    """Raise `UsageError` if an unknown flag looks like a misspelled one of this command.

    Such a flag would be passed to vLLM, which refuses it only after the draft has loaded. Also raise if a flag stands
    before TARGET, because it would be parsed as TARGET.
    """
    target = context.params["target"]
    if target.startswith("-"):
        raise UsageError(f"the first word is {target!r}; name TARGET first, then the flags")
    check_typos(context, context.args)


def check_typos(context: typer.Context, words: list[str]) -> None:
    """Raise `UsageError` if one of these unknown words looks like a misspelled option of the command."""
    ours = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            near = difflib.get_close_matches(name.replace("_", "-"), ours, n=1, cutoff=_NEAR)
            if near:
                raise UsageError(f"unknown flag {name}: did you mean {near[0]}?")


def vllm_arguments(context: typer.Context, given: list[str] | None) -> dict[str, Any]:
    """Return arguments for `vllm.LLM`: those of `--vllm-arg` (`given`), and vLLM's own flags from the command line.

    Raise `UsageError` if a flag looks like a misspelled flag of this command.
    """
    check_flag_typos(context)
    return {**parse_key_values("--vllm-arg", given), **Flags(context.args).arguments()}


def draft_arguments(given: list[str] | None) -> list[str]:
    """Return the values of `--draft-arg` as command-line words for `specbranch draft`.

    Raise `UsageError` for a value that is not NAME=VALUE, or that sets an option reserved for the calling command.
    """
    words: list[str] = []
    for one in given or ():
        name, is_pair, value = one.partition("=")
        name = name.removeprefix("--").replace("_", "-")
        if not name or not is_pair:
            raise UsageError(f"--draft-arg is {one!r}; give NAME=VALUE, such as cache-tokens=65536")
        if name in _SET_BY_US:
            raise UsageError(f"--draft-arg sets {name}, which this command sets itself; run `specbranch draft` instead")
        words += [f"--{name}", value]
    return words


def remote_draft(addresses: list[str] | None, keys: Path | None) -> RemoteDraft | None:
    """Return the draft services that `--draft-address` and `--draft-keys` name; None without an address.

    Raise `UsageError` for keys without an address.
    """
    if keys is not None and not addresses:
        raise UsageError("--draft-keys belongs to --draft-address, which is missing")
    return RemoteDraft(normalize_addresses(addresses), keys) if addresses else None


def check_directory(option: str, path: Path | None) -> None:
    """Raise `UsageError` if the directory of a file to write does not exist; `option` is the option for this file.

    Commands call this before the work whose result they write.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{option} is {path}, but there is no directory {path.parent}; create it first")


def parse_key_values(option: str, given: Sequence[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE pairs into a dict; values are parsed as JSON if possible, else kept as strings.

    Raise `UsageError`, which names `option`, for a text that is not KEY=VALUE.
    """
    found: dict[str, Any] = {}
    for one in given or ():
        key, is_pair, value = one.partition("=")
        if not key or not is_pair:
            raise UsageError(f"{option} is {one!r}; give KEY=VALUE, such as wait_for_draft=true")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def may_take_turns(planner: str, settings: Mapping[str, Any]) -> bool:
    """Return whether target and draft may take turns on the same cores: with `budget`, unless a setting forbids it."""
    return planner == DEFAULT_PLANNER and settings.get("takes_turns") is not False
