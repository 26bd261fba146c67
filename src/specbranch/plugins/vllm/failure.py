"""Why vLLM did not start, in one sentence with what to do, from the end of its log."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)$")
_INVALID = re.compile(
    r"^\s*(?:\([^)]*\) )?\s*Value error, (\S.*?)(?: \[type=.*)?$"
)  # below "1 validation error for ..."
_USAGE = re.compile(r"(?:^|\s)(\S+): error: (\S.*)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FOLLOWS = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")
_LEN = 300  # characters of vLLM's own words

_ADVICE = (
    ("Free memory on device", "free some memory, or give vLLM a smaller share with --gpu-memory-utilization"),
    ("is less than desired GPU memory", "give vLLM a smaller share with --gpu-memory-utilization"),
    ("No available memory for the cache", "raise --gpu-memory-utilization, or lower --max-model-len"),
    ("larger than the available KV cache memory", "lower --max-model-len, or raise --gpu-memory-utilization"),
    ("greater than the derived max_model_len", "lower --max-model-len"),
    ("Address already in use", "choose another port with --port"),
    ("out of memory", "lower --gpu-memory-utilization or --max-model-len, or use a smaller model"),
    ("Cannot allocate memory", "use a smaller model, or a data type with fewer bytes (--dtype)"),
    ("can't allocate memory", "use a smaller model, or a data type with fewer bytes (--dtype)"),
    ("trust_remote_code", "if you trust the model's own code, add --trust-remote-code"),
    ("is not supported", "see vLLM's list of supported models"),
    ("No module named", "install what is missing; `specbranch doctor` lists what is there"),
)
_KILLED = -9


class FailureLog:
    """Listens to the lines of vLLM's log, and remembers its last error that is not just the echo of another."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._cause: str | None = None
        self._has_echo = False
        for line in lines:
            self.hear(line)

    def hear(self, line: str) -> None:
        """One more line."""
        plain = _ANSI.sub("", line).rstrip()
        invalid = _INVALID.match(plain)
        if invalid:
            self._cause = invalid[1]
            return
        found = _ERROR.search(plain) or _USAGE.search(plain)
        if found and any(words in plain for words in _FOLLOWS):
            self._has_echo = True
        elif found:
            self._cause = f"{found[1]}: {found[2]}" if _ERROR.search(plain) else found[2]

    def cause(self, code: int | None) -> str:
        """What went wrong, and the way out. `code` is the exit code, negative for a signal."""
        if self._cause is None or code == _KILLED:
            if code == _KILLED or self._has_echo:
                who = "it was killed by SIGKILL" if code == _KILLED else "its engine ended without a word"
                return f"{who}, most likely because memory ran out; {_ADVICE[0][1]}"
            return f"it ended with code {code} and named no cause"
        advice = next((advice for words, advice in _ADVICE if words.lower() in self._cause.lower()), None)
        cause = self._cause if len(self._cause) <= _LEN else f"{self._cause[:_LEN]}..."
        return f"{cause.rstrip('.')}; {advice}" if advice else cause
