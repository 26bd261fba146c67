"""Search by coverage, with atheris: `python -m tests.fuzz TARGET [FILE | OPTION OF LIBFUZZER]...`.

With a file: feed that one input. What is found on the way is kept in `build/fuzz/TARGET`, an input that crashes beside
it. Without end; `-max_total_time=60` or `-runs=100000` sets one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fuzz.corpus import read_cases


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("python -m tests.fuzz needs atheris: pip install atheris")
    with atheris.instrument_imports(include=["specbranch"]):
        from tests.fuzz.targets import TARGETS, feed
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz TARGET [FILE | OPTION OF LIBFUZZER]...; targets: {', '.join(TARGETS)}")
    name, given = sys.argv[1], sys.argv[2:]
    if all(word.startswith("-") for word in given):
        found = Path("build", "fuzz", name)
        found.mkdir(parents=True, exist_ok=True)
        for case, data in read_cases(name).items():
            (found / case).write_bytes(data)
        given = [f"-artifact_prefix={found}-", *given, str(found)]

    def run(data: bytes) -> None:
        feed(TARGETS[name], data)

    atheris.Setup([sys.argv[0], *given], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
