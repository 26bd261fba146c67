"""Energy that the machine itself counts: Intel's and AMD's running average power limit, where the kernel shows it."""

from __future__ import annotations

from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


def read_joules(root: Path = _POWERCAP) -> float | None:
    """Joules of all processor packages since some moment; None where the machine cannot tell or does not let us read.

    The counters wrap around after some hours of load, so a difference below zero means nothing.
    """
    packages = sorted(root.glob("intel-rapl:[0-9]"))
    try:
        return sum(int((package / "energy_uj").read_text()) for package in packages) / 1e6 if packages else None
    except (OSError, ValueError):
        return None
