#!/usr/bin/env python3
"""Ask pip-audit for known vulnerabilities of every package in locks/, and say for each file what came of it.

A vulnerability ends it with 1. Without a network nothing can be known; that is said, and is no failure.
"""

import json
import subprocess
import sys
from pathlib import Path

LOCKS = sorted((Path(__file__).parents[1] / "locks").glob("*.txt"))
OPTIONS = ("--progress-spinner", "off", "--format", "json", "--disable-pip", "--no-deps", "--require-hashes")


def verdict(report: str, error: str) -> tuple[bool, str]:
    """Whether vulnerabilities are known, and a line that says so, from what pip-audit printed."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError):
        return (
            False,
            f"NOT AUDITED, audit it where there is a network: {(error.strip().splitlines() or ['no answer'])[-1]}",
        )
    bad = [f"{one['name']} {one['version']} ({flaw['id']})" for one in packages for flaw in one.get("vulns", ())]
    if bad:
        return True, f"known vulnerabilities: {', '.join(bad)}; renew with scripts/lock"
    skipped = sum("skip_reason" in one for one in packages)
    if skipped:
        return False, f"NOT AUDITED: {skipped} of {len(packages)} packages are unknown to the service that was asked"
    return False, f"no known vulnerabilities in {len(packages)} packages"


def main() -> None:
    tool = Path(sys.executable).with_name("pip-audit")
    found = False
    for lock in LOCKS:
        done = subprocess.run([tool, *OPTIONS, "-r", lock], capture_output=True, text=True, check=False)
        is_bad, line = verdict(done.stdout, done.stderr)
        found |= is_bad
        print(f"{lock.parent.name}/{lock.name}: {line}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
