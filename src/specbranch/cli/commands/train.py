"""`specbranch train`: collect examples from a pair, train H-RAD on them, and score it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbranch.bench.scenario import TASKS, PromptError, read_prompts
from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_help_alone, print_json
from specbranch.cli.options import AsJson, Device, example
from specbranch.core.planners import draft_length_limit
from specbranch.errors import UsageError
from specbranch.hrad.examples import CollectDtype, CollectOptions, ExamplesError, read_examples
from specbranch.hrad.examples import collect as collect_examples
from specbranch.hrad.network import HradError
from specbranch.hrad.training import FitOptions, Score, evaluate

train = typer.Typer(
    invoke_without_command=True,
    help="Train H-RAD, a predictor of acceptance that looks at the target's hidden states.",
)
train.callback()(print_help_alone)


@train.command(
    epilog=example("specbranch train collect TARGET --draft DRAFT --task gsm8k=gsm8k.jsonl:160 --out ex"),
)
def collect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Target model with unquantized weights: a path, a name in $SPECBRANCH_MODELS, or a Hugging Face name.",
            show_default=False,
        ),
    ],
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Draft model with unquantized weights, named like TARGET.", show_default=False
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option(
            "--task",
            metavar="TASK=FILE:COUNT",
            help=f"Use COUNT prompts from FILE; repeatable. Tasks: {', '.join(TASKS)}.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory for the examples; an interrupted collection is resumed.", show_default=False
        ),
    ],
    layers: Annotated[
        int, typer.Option(metavar="N", help="How many of the target's last layers are features.", min=1)
    ] = 4,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum tokens in one answer.", min=8)] = 160,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature of the target; 0 is greedy.", min=0.0)
    ] = 0.0,
    batch: Annotated[int, typer.Option(metavar="N", help="Answers that are generated together.", min=1)] = 64,
    device: Device = "cpu",
    dtype: Annotated[
        CollectDtype,
        typer.Option(help="int8 gives both models 8-bit weights and activations; for a CPU."),
    ] = "auto",
) -> None:
    """Let the target answer prompts, and write one training example for each token of the answers.

    An example has the target's hidden states, and the number of next tokens at which the draft agrees.
    """
    with friendly_errors(UsageError, PromptError, ExamplesError, ImportError, OSError):
        messages = dict(_task_prompts(text) for text in tasks)
        options = CollectOptions(
            target,
            draft,
            num_layers=layers,
            max_new_tokens=max_tokens,
            temperature=temperature,
            batch=batch,
            device=device,
            dtype=dtype,
        )
        with ProgressBar() as progress:
            collect_examples(options, messages, out, partial(progress.show, "collecting"))
        examples = read_examples([out])
    num_prompts = len(set(examples.prompts.tolist()))
    console_for(False).print(f"{len(examples)} positions of {num_prompts} prompts in {out}", highlight=False)


@train.command(name="fit", epilog=example("specbranch train fit ex --out my-hrad"))
def fit_command(
    examples: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="Directories of `specbranch train collect`, all of one pair.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the predictor.", show_default=False)],
    window: Annotated[
        int,
        typer.Option(metavar="N", help="Draft tokens to predict ahead: the --gamma that is used to serve.", min=1),
    ] = draft_length_limit("specbranch"),
    balance: Annotated[
        float,
        typer.Option(
            metavar="X", help="Class balancing: 0 = natural frequencies, 1 = equal weights.", min=0.0, max=1.0
        ),
    ] = 0.0,
    epochs: Annotated[
        int, typer.Option(metavar="N", help="Maximum epochs; training stops early on held-out prompts.", min=1)
    ] = 20,
    across: Annotated[
        bool, typer.Option("--across", help="Also train on each task alone and test on all tasks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fit the predictor and test it on prompts that it has not seen.

    --out then holds the predictor, its scores and their figure;
    use it with `specbranch serve --predictor`.
    """
    with friendly_errors(UsageError, ExamplesError, HradError, ImportError, OSError):
        data = read_examples(examples).settled(window)
        with ProgressBar() as progress:
            found = evaluate(data, FitOptions(window=window, balance=balance, epochs=epochs), across, progress.show)
        found.write(out)
        _print(found.scores, as_json)
        if as_json:
            print_json(found.as_json())


def _task_prompts(text: str) -> tuple[str, list[str]]:
    """Parse a value of `--task`, TASK=FILE:COUNT, and return the task and COUNT prompts from the file."""
    task, _, rest = text.partition("=")
    file, _, count = rest.rpartition(":")
    if not file or not count.isdigit():
        raise UsageError(f"--task is {text!r}; write TASK=FILE:COUNT, such as gsm8k=gsm8k.jsonl:160")
    return task, read_prompts(task, Path(file), int(count))


def _print(scores: Mapping[str, Score], as_json: bool) -> None:
    table = Table("predicted from", "accuracy", "macro F1", "log loss", "calibration error", box=None)
    for name, one in scores.items():
        values = (one.accuracy, one.macro_f1, one.log_loss, one.calibration_error)
        table.add_row(name, *(f"{value:.3f}" for value in values))
    console_for(as_json).print(table)
