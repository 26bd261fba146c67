"""Energy by the machine's own counters (RAPL of Intel and AMD), where the kernel makes them readable."""

from __future__ import annotations

from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


def read_joules(root: Path = _POWERCAP) -> float | None:
    """Joules of all processor packages since some moment; None if there are no counters or we may not read them.

    The counters wrap around after some hours of load, so a negative difference means nothing.
    """
    packages = sorted(root.glob("intel-rapl:[0-9]"))
    try:
        return sum(int((package / "energy_uj").read_text()) for package in packages) / 1e6 if packages else None
    except (OSError, ValueError):
        return None
