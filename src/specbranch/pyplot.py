"""The one place that loads matplotlib: late, without a screen, and with a word on what to install if it is missing."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'specbranch[bench]'") from error
    return pyplot
