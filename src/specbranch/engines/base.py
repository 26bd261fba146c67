"""The draft engine interface: the `DraftEngine` protocol, the rows it runs, and the options that open one.

A handle is one sequence of tokens in an engine's key-value cache. Handles share the cache of their common prefix.
`registry.register_engine` registers an engine by name; `tests/engines/conformance.py` checks its behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specbranch.core.distribution import Distribution
from specbranch.errors import EngineError

DTYPES = ("auto", "int8", "w8a16", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model, device and limits of an engine. They do not change while the engine lives.

    Callers must respect `row_limit`; the engine itself enforces `max_handles` and `max_tokens` by raising `EngineFull`.
    """

    model: str  # for display
    device: str  # "cpu", or the engine's name of its device
    vocab_len: int  # token ids are below this
    row_limit: int  # rows in one step
    max_handles: int  # handles open at once
    max_tokens: int  # tokens in the cache; shared ones count once
    idle_cache_tokens: int = 1 << 30  # tokens of idle sessions that may stay in the cache without slowing active ones
    dtype: str = ""  # of the weights, if known
    weight_bytes: int | None = None  # of the weights that a step of one row reads; None if unknown
    vocab_fingerprint: bytes = b""  # from `vocabulary.read_fingerprint`; if empty, targets compare only sizes


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens to append to one handle, at least one. The row yields a distribution after each of its last `num_outputs`.

    With more than one output, the row ends with n-gram guesses: each distribution but the last shows whether the guess
    after it is right.
    """

    handle: int
    tokens: tuple[int, ...]
    num_outputs: int = 1


def check_rows(rows: Sequence[Row]) -> None:
    """Raise `ValueError` unless the rows have distinct handles, and each has tokens and a valid number of outputs.

    Every engine's `run` must call this or check the same.
    """
    if len({row.handle for row in rows}) < len(rows):
        raise ValueError("one step takes at most one row per handle")
    if not all(row.tokens for row in rows):
        raise ValueError("a row needs at least one token")
    if not all(1 <= row.num_outputs <= len(row.tokens) for row in rows):
        raise ValueError("a row has from one output to as many as it has tokens")


def check_tokens(rows: Sequence[Row], vocab_len: int) -> None:
    """Raise `ValueError` for a token outside the vocabulary: on a GPU it would end the process, not only fail."""
    for row in rows:
        if row.tokens and (min(row.tokens) < 0 or max(row.tokens) >= vocab_len):
            raise ValueError(f"handle {row.handle}: tokens must be below {vocab_len}, the vocabulary's size")


def check_length(handle: int, held: int, length: int) -> None:
    """Raise `ValueError` unless `length`, given to `fork` or `truncate`, is from 0 to the handle's `held` tokens."""
    if not 0 <= length <= held:
        raise ValueError(f"handle {handle} holds {held} tokens, not {length}")


class DraftEngine(Protocol):
    """A language model that appends tokens to many sequences in one batch and returns next-token distributions.

    A class or a function opens an engine from `EngineOptions`: it loads the model or raises `EngineError`.

    Threads: only one thread calls methods at a time, though not always the same one, so an engine needs no locks.
    Any thread may read `info` at any time.

    Errors: `EngineFull` if no handle is free or memory is short, `ValueError` for a wrong length or wrong rows,
    `KeyError` for a handle that is not open. All three leave the engine unchanged. Any other exception means that a
    step failed; see `run`.
    """

    @property
    def info(self) -> EngineInfo:
        """Model, device and limits. Cheap to read and constant, even after `shutdown`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache; shared tokens count once. 0 when no handle is open. Callers read it every step."""
        ...

    def open(self) -> int:
        """Open a handle with no tokens and return it.

        A handle is any non-negative number that no open handle has; numbers of closed handles may be reused.
        Raises `EngineFull` if `max_handles` are open.
        """
        ...

    def fork(self, handle: int, length: int) -> int:
        """Open a handle that begins with the first `length` tokens of `handle`, from none to all, and return it.

        The fork shares the cache instead of copying it: it adds nothing to `num_tokens` and takes microseconds, however
        long the prefix is. Afterwards the two are independent: running, truncating or closing one does not affect the
        other. Raises `EngineFull` if `max_handles` are open, and `ValueError` if the handle holds fewer tokens.
        """
        ...

    def truncate(self, handle: int, length: int) -> None:
        """Keep the first `length` tokens of a handle and drop the rest. Forks of the handle keep theirs.

        The next row continues after the tokens kept. The engine frees tokens that no handle holds any more at once.
        Raises `ValueError` if the handle holds fewer tokens.
        """
        ...

    def close(self, handle: int) -> None:
        """Close a handle. Its forks stay open; tokens that no open handle holds are freed immediately."""
        ...

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        """Append every row's tokens to its handle, in one batch; return the distributions of the rows, in their order.

        A row with several outputs gives several distributions, in the order of its tokens.

        Rows may differ in length: most have one token, a prefill has thousands. A distribution must depend on the
        handle's tokens only, up to rounding: not on other rows, their order, or how the tokens came into the cache. It
        has the most likely tokens at temperature 1, most likely first, and the entropy over the whole vocabulary.

        Raises `EngineFull` if the tokens of all rows do not fit, and `ValueError` as `check_rows` does, and changes
        no handle then. A token outside the vocabulary may raise, but must not end the process. After another exception
        the rows' handles may hold some new tokens, but must still accept `close`, and `truncate` to the length they
        had before; other handles must be unharmed.
        """
        ...

    def shutdown(self) -> None:
        """Free memory and devices; open handles are lost. Callers call this once, and read only `info` afterwards."""
        ...


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options to open an engine: the model, its device and the limits.

    `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the Hugging Face hub (`repo` for torch,
    `repo:file.gguf` for llama.cpp). `threads` None lets the engine choose. `dtype` is one of `DTYPES` and applies to
    torch: int8 quantizes weights and activations, w8a16 only weights, and auto picks the fastest on a CPU and the
    model's own dtype on other devices. llama.cpp keeps the file's weights; float32 gives it a 32-bit KV cache.
    `max_tokens` None lets the engine size the cache and report it in `EngineInfo.max_tokens`.
    """

    model: str
    device: str = "cpu"
    threads: int | None = None
    dtype: str = "auto"
    max_tokens: int | None = None  # in the cache, shared ones counted once; None sizes it by free memory
    max_handles: int = 128  # open at once
    row_limit: int = 64  # rows in one step
    top_k: int = 32  # tokens per distribution
    on_progress: Callable[[str], None] = field(default=_silent, compare=False, repr=False)  # gets each stage of loading

    def __post_init__(self) -> None:
        for name in ("threads", "max_tokens", "max_handles", "row_limit", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"{name} is {value}; give at least 1")
