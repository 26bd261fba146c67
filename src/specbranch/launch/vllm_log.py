"""Read from vLLM's log the stage that its start has reached, and the cause of a failure."""

from __future__ import annotations

import re
from collections.abc import Iterable

# In the order of a start. A line with one of the words begins the stage; the start never goes back to an earlier stage.
_STAGES = (
    ("starting (imports take some seconds)", ()),
    ("setting up the engine", ("Initializing a V1 LLM engine", "Initializing an LLM engine")),
    ("loading weights", ("Starting to load model", "Loading safetensors", "Loading weights")),
    (
        "warming up; compiling takes minutes at a first start (--enforce-eager leaves it out)",
        ("Warming up model", "Warming up", "torch.compile", "Dynamo bytecode", "Compiling a graph"),
    ),
    ("capturing CUDA graphs", ("Capturing CUDA graphs", "Graph capturing")),
    ("starting the HTTP server", ("Starting vLLM", "Started server process", "Waiting for application startup")),
)


# A server logs the first; a node without a server logs one of the others.
_UP = ("Application startup complete", "headless multiproc executor", "in headless mode")
_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (\S.*)$")
_INVALID = re.compile(
    r"^\s*(?:\([^)]*\) )?\s*Value error, (\S.*?)(?: \[type=.*)?$"
)  # below "1 validation error for ..."
_USAGE = re.compile(r"(?:^|\s)(\S+): error: (\S.*)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FOLLOWS = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")
_MAX_CAUSE_LEN = 300  # characters of vLLM's own message
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


class StartupProgress:
    """The stage of vLLM's start, read from its log. `is_up`: vLLM has logged that it is ready."""

    def __init__(self) -> None:
        self._number = 0
        self.is_up = False

    @property
    def stage(self) -> str:
        """A phrase that names the stage that vLLM's start has reached."""
        return f"vLLM: {_STAGES[self._number][0]}"

    def feed(self, line: str) -> None:
        """Read one more line of the log, and update `stage` and `is_up`."""
        self.is_up = self.is_up or any(words in line for words in _UP)
        for number in range(len(_STAGES) - 1, self._number, -1):
            if any(word in line for word in _STAGES[number][1]):
                self._number = number
                return


class FailureParser:
    """Finds the cause of a failure in vLLM's log: the last error that does not merely report another one."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._cause: str | None = None
        self._has_echo = False
        for line in lines:
            self.feed(line)

    def feed(self, line: str) -> None:
        """Read one more line of the log; if it reports an error, store that for `cause`."""
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
        """Return a phrase with the cause of the failure and, if known, what to do about it.

        `code` is vLLM's exit code, negative for a signal.
        """
        if self._cause is None or code == _KILLED:
            if code == _KILLED or self._has_echo:
                end = "it was killed by SIGKILL" if code == _KILLED else "its engine ended without an error message"
                return f"{end}, most likely because memory ran out; {_ADVICE[0][1]}"
            return f"it ended with code {code} and logged no cause"
        advice = next((advice for words, advice in _ADVICE if words.lower() in self._cause.lower()), None)
        cause = self._cause if len(self._cause) <= _MAX_CAUSE_LEN else f"{self._cause[:_MAX_CAUSE_LEN]}..."
        return f"{cause.rstrip('.')}; {advice}" if advice else cause
