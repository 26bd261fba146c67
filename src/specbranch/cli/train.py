"""`specbranch train`: collect examples of a pair, fit H-RAD on them, and judge it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from specbranch.bench.profile import commit
from specbranch.bench.prompts import TASKS, PromptError, read_prompts
from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, progress_bar
from specbranch.predictor.hrad import HradError, write_hrad
from specbranch.train.collect import CollectOptions
from specbranch.train.collect import collect as collect_examples
from specbranch.train.examples import SPLITS, Examples, ExamplesError, read_examples
from specbranch.train.figures import draw_scores
from specbranch.train.fit import INPUTS, FitOptions, Network, fit
from specbranch.train.score import Score, majority, score

train = typer.Typer(no_args_is_help=True, help="Train H-RAD, the predictor on the target's features, for a pair.")


@train.command()
def collect(
    target: Annotated[str, typer.Argument(help="Dense model: a path, a name below $SPECBRANCH_MODELS, or on the hub.")],
    draft: Annotated[str, typer.Option(help="The draft model with dense weights; as TARGET.")],
    prompts: Annotated[
        list[str], typer.Option(help="task=FILE:COUNT, several times; tasks: " + ", ".join(TASKS) + ".")
    ],
    out: Annotated[Path, typer.Option(help="Directory for the examples; one that was cut off is gone on with.")],
    layers: Annotated[int, typer.Option(help="Last layers of the target that are features.", min=1)] = 4,
    answer: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=8)] = 160,
    temperature: Annotated[float, typer.Option(help="Of the target.", min=0.0)] = 0.0,
    batch: Annotated[int, typer.Option(help="Answers at once.", min=1)] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda:0: what torch knows.")] = "cpu",
) -> None:
    """Let the target answer prompts, keep its features, and see where the draft would have been right."""
    with friendly_errors(UsageError, PromptError, ExamplesError, ImportError, OSError):
        messages = dict(_messages(text) for text in prompts)
        options = CollectOptions(target, draft, layers, answer, temperature, batch, device)
        with progress_bar() as bar:
            task = bar.add_task("collecting", total=None)
            collect_examples(options, messages, out, lambda done, total: bar.update(task, completed=done, total=total))
    _describe(read_examples([out]))


@train.command(name="fit")
def fit_command(
    examples: Annotated[list[Path], typer.Argument(help="Directories of `train collect`, of one pair.")],
    out: Annotated[Path, typer.Option(help="Directory for the predictor.")],
    window: Annotated[int, typer.Option(help="Draft tokens that are foreseen.", min=1)] = 5,
    balance: Annotated[
        float, typer.Option(help="1: classes weigh alike; 0: as often as they come.", min=0.0, max=1.0)
    ] = 0.0,
    epochs: Annotated[int, typer.Option(help="At most; it ends when held-out prompts gain no more.", min=1)] = 20,
    across: Annotated[bool, typer.Option("--across", help="Also train on each task alone and test on all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Fit the predictor, judge it on prompts it has not seen, and write it with its card, figures and picture."""
    with friendly_errors(UsageError, ExamplesError, HradError, ImportError, OSError):
        data = read_examples(examples).settled(window)
        splits = {name: data.split(name) for name in SPLITS}
        for name, part in splits.items():
            if not len(part):
                raise UsageError(f"no prompt of {examples[0]} is in the {name} split; collect more prompts")
        options = FitOptions(window=window, balance=balance, epochs=epochs)
        with progress_bar() as bar:
            networks = {
                inputs: _fit(bar, splits["train"], splits["held-out"], inputs, options, inputs) for inputs in INPUTS
            }
            crossed = _across(bar, splits, options) if across else {}
        test = splits["test"]
        truth = test.classes(window)
        scores: dict[str, Score] = {"majority": majority(splits["train"].classes(window), truth)}
        for name, network in networks.items():
            scores[name] = score(network.foresee(test)[0], truth)
        card = data.card
        document: dict[str, Any] = {
            "target": card.target,
            "draft": card.draft,
            "window": window,
            "places": {name: len(part) for name, part in splits.items()},
            "shares": (splits["train"].classes(window)[:, None] == range(3)).mean(0).tolist(),
            "epochs": {name: network.epochs for name, network in networks.items()},
            "scores": {name: one.as_json() for name, one in scores.items()},
            "by_task": _by_task(networks["features"], test, window),
            "across": crossed,
        }
        out.mkdir(parents=True, exist_ok=True)
        own = {
            "target": card.target,
            "draft": card.draft,
            "num_layers": card.num_layers,
            "hidden_len": card.hidden_len,
            "window": window,
            "tasks": list(card.tasks),
            "positions": len(splits["train"]),
            "commit": commit(Path(__file__).parent),
        }
        write_hrad(out, networks["features"].tensors, own)
        (out / "scores.json").write_text(json.dumps(document, indent=1) + "\n")
        draw_scores(scores, "features", out / "scores.png")
        _print(scores, as_json)
        if as_json:
            print_json(document)


def _fit(bar: Progress, train: Examples, held_out: Examples, inputs: Any, options: FitOptions, name: str) -> Network:
    task = bar.add_task(f"fitting on {name}", total=options.epochs)
    network = fit(
        train,
        held_out,
        inputs,
        options,
        lambda epoch, most, loss: bar.update(task, completed=epoch, description=f"fitting on {name}: loss {loss:.3f}"),
    )
    bar.remove_task(task)
    return network


def _across(bar: Progress, splits: dict[str, Examples], options: FitOptions) -> dict[str, dict[str, float]]:
    """Accuracy on every task of a predictor trained on one."""
    found = {}
    for task in splits["train"].card.tasks:
        parts = [splits[name].of_task(task) for name in ("train", "held-out")]
        if all(len(part) for part in parts):
            network = _fit(bar, parts[0], parts[1], "features", options, task)
            found[task] = {
                name: one["accuracy"] for name, one in _by_task(network, splits["test"], options.window).items()
            }
    return found


def _by_task(network: Network, test: Examples, window: int) -> dict[str, dict[str, Any]]:
    found = {}
    for task in test.card.tasks:
        part = test.of_task(task)
        if len(part):
            one = score(network.foresee(part)[0], part.classes(window))
            found[task] = {name: getattr(one, name) for name in ("places", "accuracy", "macro_f1", "log_loss")}
    return found


def _messages(text: str) -> tuple[str, list[str]]:
    """A task and its messages from task=FILE:COUNT."""
    task, _, rest = text.partition("=")
    file, _, count = rest.rpartition(":")
    if not file or not count.isdigit():
        raise UsageError(f"--prompts is {text!r}; write task=FILE:COUNT")
    return task, read_prompts(task, Path(file), int(count))


def _describe(examples: Examples) -> None:
    console = console_for(False)
    console.print(f"{len(examples)} places of {len(set(examples.prompts.tolist()))} prompts")


def _print(scores: dict[str, Score], as_json: bool) -> None:
    table = Table("foreseen from", "accuracy", "macro F1", "log loss", "calibration error", box=None)
    for name, one in scores.items():
        figures = (one.accuracy, one.macro_f1, one.log_loss, one.calibration_error)
        table.add_row(name, *(f"{figure:.3f}" for figure in figures))
    console_for(as_json).print(table)
