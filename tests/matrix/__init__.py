"""The matrix: the tests that matter most, on every release of vLLM that we support. `scripts/matrix` runs it.

All these releases need the same torch, so one environment serves them all: each vLLM lies in a directory of its own
(`overlay`), and `PYTHONPATH` chooses. `runs` says what is run, `results` keeps what came of it, `page` makes a page.
"""

from __future__ import annotations

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
