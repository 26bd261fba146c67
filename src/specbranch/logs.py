"""Structured logs: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """A log formatter that writes each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logs(style: LogFormat, level: str) -> None:
    """Send the package's log records of at least `level`, such as "info", to standard error, as text or as JSON."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    logger = logging.getLogger("specbranch")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())


class RateLimitedWarning:
    """A function that logs a warning, but at most one per second, so that peers cannot flood the log.

    Each warning says how many were skipped since the warning before it.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._next_s = 0.0
        self._num_left_out = 0

    def __call__(self, message: str, *args: object) -> None:
        """Log a warning, or only count it if less than a second has passed since the last logged one."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        left_out = f" ({self._num_left_out} more were not logged)" if self._num_left_out else ""
        self._next_s, self._num_left_out = now_s + 1.0, 0
        self._log.warning(message + "%s", *args, left_out)
