"""The `specbranch` command: puts all subcommands together."""

from __future__ import annotations

from typing import Annotated

import typer

from specbranch.cli.commands.bench import bench
from specbranch.cli.commands.check import check
from specbranch.cli.commands.doctor import doctor
from specbranch.cli.commands.draft import draft, keys
from specbranch.cli.commands.generate import generate
from specbranch.cli.commands.inspect import describe, drain, ping
from specbranch.cli.commands.plan import plan, profile
from specbranch.cli.commands.quantize import quantize
from specbranch.cli.commands.serve import serve
from specbranch.cli.commands.simulate import simulate
from specbranch.cli.commands.timeline import timeline
from specbranch.cli.commands.top import top
from specbranch.cli.commands.train import train
from specbranch.cli.console import print_help_alone
from specbranch.cli.options import FLAGS_GO_THROUGH, example
from specbranch.extensions import load_extensions
from specbranch.version import __version__

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="`specbranch COMMAND --help` explains a command and ends with an example.",
)

_USE, _EVALUATE, _STUDY, _OPERATE = "Use", "Evaluate", "Study", "Operate"


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"specbranch {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parallel speculative decoding for vLLM: a small draft model on its own device keeps continuations ready."""
    load_extensions()
    print_help_alone(context)


# The help lists panels and commands in this order; groups of commands come last in their panel.
for command, panel, line in (
    (serve, _USE, "specbranch serve TARGET --draft DRAFT --port 8000"),
    (generate, _USE, 'specbranch generate TARGET --draft DRAFT --prompt "Hello" --compare'),
    (quantize, _USE, "specbranch quantize TARGET ./target-int8"),
    (plan, _EVALUATE, "specbranch plan TARGET --draft DRAFT --prompts mine.jsonl"),
    (check, _EVALUATE, "specbranch check TARGET --draft DRAFT --quick"),
    (simulate, _STUDY, "specbranch simulate --acceptance 0.8 --c 6 --planners sps,pearl,budget"),
    (timeline, _STUDY, "specbranch timeline run.json --plot run.png"),
    (profile, _STUDY, "specbranch profile draft.gguf --cores 1 --rows 1,2,4,8"),
    (draft, _OPERATE, "specbranch draft draft.gguf --listen ipc:///tmp/draft.sock"),
    (keys, _OPERATE, "specbranch keys ./keys"),
    (ping, _OPERATE, "specbranch ping ipc:///tmp/draft.sock"),
    (describe, _OPERATE, "specbranch describe tcp://10.0.0.7:5757 --keys ./keys"),
    (top, _OPERATE, "specbranch top http://localhost:8000"),
    (drain, _OPERATE, "specbranch drain tcp://10.0.0.7:5757 --keys ./keys --wait 60"),
    (doctor, _OPERATE, "specbranch doctor TARGET --draft DRAFT"),
):
    settings = FLAGS_GO_THROUGH if command in (serve, generate, plan, check) else None
    app.command(rich_help_panel=panel, epilog=example(line), context_settings=settings)(command)
app.add_typer(bench, name="bench", rich_help_panel=_EVALUATE)
app.add_typer(train, name="train", rich_help_panel=_STUDY)
