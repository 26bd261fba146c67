"""The `specbranch` command. Only this layer composes the others."""

from __future__ import annotations

from typing import Annotated

import typer

from specbranch import __version__
from specbranch.cli.check import check
from specbranch.cli.draft import draft, keys
from specbranch.cli.profile import profile
from specbranch.cli.simulate import simulate

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


for command in (check, draft, keys, profile, simulate):
    app.command()(command)
