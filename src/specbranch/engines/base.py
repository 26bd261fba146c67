"""What a draft engine is: the `DraftEngine` protocol, its rows, and the options that open one.

A handle is one sequence of tokens in an engine's key-value cache. Handles share the cache of their common prefix.
`registry.register_engine` makes an engine known by name; `tests/engines/conformance.py` checks it.
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
    """What callers need to know of an engine. It does not change while the engine lives.

    Callers keep to `row_limit`; the engine itself enforces `max_handles` and `max_tokens`, by `EngineFull`.
    """

    model: str  # a name for people
    device: str  # "cpu", or what the engine calls its device
    vocab_len: int  # tokens are numbers from 0 up to this one, exclusive
    row_limit: int  # rows in one step
    max_handles: int  # handles open at once
    max_tokens: int  # tokens in the cache, shared ones counted once
    idle_cache_tokens: int = 1 << 30  # of idle sessions, that may stay in the cache without slowing down the others
    dtype: str = ""  # of the weights, where the engine chose or was told one
    weight_bytes: int | None = None  # of the model: what one step must at least read; None if the engine cannot tell
    vocab_fingerprint: bytes = b""  # by `vocabulary.read_fingerprint`; without it targets compare sizes only


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens to append to one handle, at least one. Distributions behind the last `num_outputs` of them are returned.

    More than one output is a chain that is guessed: each token's distribution confirms the next one or not.
    """

    handle: int
    tokens: tuple[int, ...]
    num_outputs: int = 1


def check_rows(rows: Sequence[Row]) -> None:
    """Raise `ValueError` unless the rows have different handles, a token and an output each.

    Every engine's `run` must check.
    """
    if len({row.handle for row in rows}) < len(rows):
        raise ValueError("one step takes at most one row per handle")
    if not all(row.tokens for row in rows):
        raise ValueError("a row needs at least one token")
    if not all(1 <= row.num_outputs <= len(row.tokens) for row in rows):
        raise ValueError("a row has from one output to as many as it has tokens")


def check_length(handle: int, held: int, length: int) -> None:
    """Raise `ValueError` unless a handle with `held` tokens has a prefix of `length`. For `fork` and `truncate`."""
    if not 0 <= length <= held:
        raise ValueError(f"handle {handle} holds {held} tokens, not {length}")


class DraftEngine(Protocol):
    """A language model that appends tokens to many sequences in one batch and returns next-token distributions.

    Made from `EngineOptions` by a class or a function, which loads the model and raises `EngineError` if it cannot.

    Threads: methods are called by one thread at a time, though not always by the same one; an engine needs no locks.
    Only `info` may be read by any thread at any time.

    Errors: `EngineFull` where there is no room, `ValueError` for a wrong length or wrong rows, `KeyError` for a handle
    that is not open. All three leave the engine as it was. Any other exception means that a step failed; see `run`.
    """

    @property
    def info(self) -> EngineInfo:
        """Model, device and limits. Read often, so it must be cheap; always the same, also after `shutdown`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache now, shared ones counted once; 0 when no handle is open. Read before every step."""
        ...

    def open(self) -> int:
        """A new handle with no tokens.

        A handle is any number of zero or more that no open handle has; numbers of closed handles may be used again.
        Raises `EngineFull` if `max_handles` are open.
        """
        ...

    def fork(self, handle: int, length: int) -> int:
        """A new handle that begins with the first `length` tokens of another, from none to all of them.

        The cache is shared, not copied: a fork adds nothing to `num_tokens` and takes microseconds, however long the
        prefix is. Afterwards the two are independent: either may be run, truncated or closed without effect on the
        other. Raises `EngineFull` if `max_handles` are open, and `ValueError` if the handle holds fewer tokens.
        """
        ...

    def truncate(self, handle: int, length: int) -> None:
        """Keep the first `length` tokens of a handle and forget the rest. Forks of the handle keep theirs.

        The next row continues behind the tokens kept. Tokens that no handle holds any more free their room at once.
        Raises `ValueError` if the handle holds fewer tokens.
        """
        ...

    def close(self, handle: int) -> None:
        """Forget a handle. Its forks live on; tokens that no handle holds any more free their room at once."""
        ...

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        """Append every row's tokens to its handle, in one batch; the distributions behind the rows, in their order.

        A row with several outputs gives several distributions, in the order of its tokens.

        Rows may differ in length: most have one token, a prefill has thousands. A distribution must depend on the
        handle's tokens only, up to rounding: not on other rows, their order, or how the tokens came into the cache. It
        has the most likely tokens at temperature 1, most likely first, and the entropy over the whole vocabulary.

        Raises `EngineFull` if the tokens of all rows do not fit, and `ValueError` as `check_rows` does; no handle is
        changed then. A token outside the vocabulary may raise, but must not end the process. After any other
        exception the rows' handles may hold some of the new tokens, but must still accept `truncate` to the length
        they had before, and `close`; other handles must be unharmed.
        """
        ...

    def shutdown(self) -> None:
        """Free memory and devices; open handles are lost. Called once, at the end; only `info` is read afterwards."""
        ...


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model to load, on which device, and the limits of the engine.

    `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the Hugging Face hub (`repo` for torch,
    `repo:file.gguf` for llama.cpp). `threads` None leaves the choice to the engine. `dtype` is one of `DTYPES`, for
    torch: int8 quantizes weights and activations, w8a16 only weights, and auto takes the fastest on a CPU and the
    model's own dtype on other devices. llama.cpp leaves weights as they are; float32 gives it a cache of 32 bits.
    `max_tokens` None leaves the size of the cache to the engine, which has `EngineInfo.max_tokens` tell it.
    """

    model: str
    device: str = "cpu"
    threads: int | None = None
    dtype: str = "auto"
    max_tokens: int | None = None  # in the cache, shared ones counted once; by memory if None
    max_handles: int = 128  # open at once
    row_limit: int = 64  # rows in one step
    top_k: int = 32  # tokens of a distribution
    on_progress: Callable[[str], None] = field(default=_silent, compare=False, repr=False)  # hears what loading does

    def __post_init__(self) -> None:
        for name in ("threads", "max_tokens", "max_handles", "row_limit", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"{name} is {value}; give at least 1")
