"""The exception classes that several modules share, and a short form for the messages of other exceptions."""

from __future__ import annotations


class SpecBranchError(Exception):
    """The base class of this package's exceptions, which the caller can act on; the message says how."""


class EngineError(SpecBranchError, RuntimeError):
    """An engine cannot do what the caller asks for. The message is shown to users; it says why, and what to do."""


class EngineFull(EngineError):
    """The engine has no free handle for another sequence in its KV cache, or no free memory for more tokens.

    The failed call has changed nothing; close a handle and try again.
    """


class UsageError(SpecBranchError, ValueError):
    """Options are wrong or contradict each other."""


class FlagError(SpecBranchError, ValueError):
    """A flag of vLLM has an unusable value, or sets what `specbranch` sets itself; the message says what to do."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    Error messages of the library Transformers can fill a page.
    """
    return next(iter(str(error).splitlines()), type(error).__name__)
