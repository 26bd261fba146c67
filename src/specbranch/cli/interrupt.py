"""Ctrl-C while an engine runs: the first one is noted, so that the step can finish; the second one stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupt:
    """A context manager for the main thread."""

    def __init__(self) -> None:
        self.is_asked = False
        self._before: object = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
