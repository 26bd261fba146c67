"""Run the command line: `python -m specbranch`."""

from __future__ import annotations

from specbranch.cli import app

if __name__ == "__main__":
    app(prog_name="specbranch")
