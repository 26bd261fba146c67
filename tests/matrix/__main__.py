"""Run the tests that matter most on every release of vLLM that we support; `scripts/matrix` starts this.

All these releases need the same torch, so one environment serves them all: each vLLM lies in a directory of its own
(`overlay`), and `PYTHONPATH` chooses. `runs` says what to run and keeps the results, `page` writes them up.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from pathlib import Path

from specbranch.machine import provenance
from tests.matrix import page
from tests.matrix.overlay import prepare
from tests.matrix.runs import RELEASES, RESULTS, RUNS, carry_out, has_passed, read_results, write_results

_TITLE = "Run the tests that matter most on every release of vLLM that we support."


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=_TITLE)
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, help=f"releases of vLLM; default: {' '.join(RELEASES)}"
    )
    parser.add_argument("--again", action="store_true", help="also what the result file has")
    parser.add_argument("--directory", type=Path, default=Path("build/matrix"), help="where releases are installed")
    parser.add_argument("--wheels", type=Path, help="a directory of wheels that need not be downloaded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the result file")
    parser.add_argument("--page", action="store_true", help="only make the page of the result file")
    args = parser.parse_args()
    if args.page:
        page.write()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    source = provenance()
    overlays = {release: args.directory.resolve() / release for release in args.releases}
    beside = {release: _installed(release, overlay, args.wheels) for release, overlay in overlays.items()}
    # Run by run, not release by release: what is found early on one release is worth knowing before the rest.
    for run, (release, overlay) in itertools.product(RUNS, overlays.items()):
        known = read_results(args.results)
        line = known.setdefault(release, {"release": release, "runs": {}})
        if line["runs"].get(run.name, {}).get("passed") and not args.again:
            continue
        found = carry_out(run, overlay, overlay.with_name(f"{release}-{run.name}.log"))
        _say(f"{release}: {run.name}: {found}")
        line["runs"][run.name] = {**found, "commit": source["commit"]}
        line |= {"beside": beside[release], "provenance": source}
        write_results(known, args.results)
    known = read_results(args.results)
    if args.results == RESULTS:
        page.write()
    return int(not all(has_passed(known[release]) for release in args.releases))


def _installed(release: str, overlay: Path, wheels: Path | None) -> list[str]:
    overlay.mkdir(parents=True, exist_ok=True)
    beside = prepare(overlay, release, wheels)
    _say(f"{release}: installed with {', '.join(beside) or 'nothing else'}")
    return beside


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
