"""The `specbranch` command. Only this layer composes the others."""

from __future__ import annotations

from typing import Annotated

import typer

from specbranch.cli.bench import bench
from specbranch.cli.check import check
from specbranch.cli.draft import draft, keys
from specbranch.cli.generate import generate
from specbranch.cli.plan import plan
from specbranch.cli.profile import profile
from specbranch.cli.serve import FLAGS_GO_THROUGH, serve
from specbranch.cli.simulate import simulate
from specbranch.cli.timeline import timeline
from specbranch.cli.train import train
from specbranch.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specbranch {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Branch-parallel speculative decoding: a draft on its own device prepares for the target's verdicts."""


for command in (check, draft, generate, keys, plan, profile, simulate, timeline):
    app.command()(command)
app.command(context_settings=FLAGS_GO_THROUGH)(serve)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
