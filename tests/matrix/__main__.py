"""Run the matrix; `scripts/matrix` starts this."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from specbranch.provenance import provenance
from tests.matrix import results
from tests.matrix.overlay import prepare
from tests.matrix.runs import RUNS, carry_out

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=__doc__)
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, help=f"releases of vLLM; default: {' '.join(RELEASES)}"
    )
    parser.add_argument("--again", action="store_true", help="also those that the result file has")
    parser.add_argument("--directory", type=Path, default=Path("build/matrix"), help="where releases are installed")
    parser.add_argument("--wheels", type=Path, help="a directory of wheels that need not be downloaded")
    parser.add_argument("--results", type=Path, default=results.FILE, help="the result file")
    args = parser.parse_args()
    source = provenance()
    has_failed = False
    for release in args.releases:
        found = results.read(args.results)
        if release not in found or args.again:
            found[release] = {**_on(release, args.directory.resolve(), args.wheels), "provenance": source}
            results.write(found, args.results)
        else:
            _say(f"{release}: is in the result file")
        has_failed |= not results.has_passed(found[release])
    return int(has_failed)


def _on(release: str, directory: Path, wheels: Path | None) -> dict[str, Any]:
    overlay = directory / release
    overlay.mkdir(parents=True, exist_ok=True)
    _say(f"{release}: is installed")
    beside = prepare(overlay, release, wheels)
    _say(f"{release}: with {', '.join(beside) or 'nothing else'}")
    runs = {}
    for run in RUNS:
        runs[run.name] = carry_out(run, overlay, directory / f"{release}-{run.name}.log")
        _say(f"{release}: {run.name}: {runs[run.name]}")
    return {"release": release, "beside": beside, "runs": runs}


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
