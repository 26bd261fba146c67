"""`specbranch quantize`: an int8 target from a dense one, for CPUs that emulate bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbranch.cli.console import ProgressBar, friendly_errors
from specbranch.cli.options import Target
from specbranch.engines.models import check_model_exists, local_model, weight_bytes
from specbranch.errors import SpecBranchError, UsageError

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]  # weights, configuration, tokenizer


def quantize(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.", show_default=False)],
) -> None:
    """Write a target with 8-bit weights (W8A8), output layer included.

    On a CPU without AMX, verifying several tokens then costs little more than one.
    Weights are rounded to the nearest integer; answers change slightly.
    """
    with friendly_errors(SpecBranchError, OSError):
        check_model_exists("TARGET", target)
        if out.exists():
            raise UsageError(f"{out} exists; name a directory that does not exist yet")
        from specbranch.engines.quantize import quantize_checkpoint

        with ProgressBar() as progress:
            source = _directory(target, progress)
            quantize_checkpoint(source, out, progress.show)
        before, after = weight_bytes(str(source)), weight_bytes(str(out))
        typer.echo(f"{out}: {after / 1e9:.2f} GB of weights, from {before / 1e9:.2f} GB")


def _directory(target: str, progress: ProgressBar) -> Path:
    """Return the directory of a model; download it from the Hugging Face hub if it is not on this machine.

    Raise `UsageError` if the model is a file.
    """
    found = local_model(target)
    if found is None:
        from huggingface_hub import snapshot_download

        progress.show(f"downloading {target}")
        return Path(snapshot_download(target, allow_patterns=_FILES))
    if not found.is_dir():
        raise UsageError(
            f"{target} is a file; name a directory with config.json and *.safetensors, or a model on the hub"
        )
    return found
