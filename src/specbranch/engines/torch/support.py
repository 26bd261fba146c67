"""Which models of Transformers the torch engine supports, and the errors for all others."""

from __future__ import annotations

from typing import Any

from specbranch.engines.protocol import EngineError

_LEAST_WINDOW = 16384  # tokens of a sliding window that a cache of no given size may be limited to


def require_full_attention(model: Any, max_tokens: int | None) -> None:
    """Refuse a model that keeps more than keys and values, or whose tokens do not see their whole sequence.

    A cache of no given size has no more tokens than the model's sliding window.
    """
    if type(model)._is_stateful or not type(model)._supports_attention_backend:
        raise unsupported(
            type(model).__name__, "it is recurrent, or Transformers does not let its attention be replaced"
        )
    kinds = set(getattr(text_config(model), "layer_types", None) or ()) - {"full_attention"}
    window, max_tokens = sliding_window(text_config(model)), _LEAST_WINDOW if max_tokens is None else max_tokens
    if window is not None and window >= max_tokens:  # no sequence is long enough to leave it
        window = None
        kinds.discard("sliding_attention")
    if window is not None:
        raise unsupported(type(model).__name__, f"its sliding window is {window}, less than max_tokens ({max_tokens})")
    if kinds:
        raise unsupported(type(model).__name__, f"it has layers of {', '.join(sorted(kinds))}")


def sliding_window(config: Any) -> int | None:
    """How many tokens a token sees at most; None if it sees all."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def text_config(model: Any) -> Any:
    """The part of a model's configuration that describes its language model."""
    return model.config.get_text_config(decoder=True)


def first_line(error: Exception) -> str:
    """The first line of an error's message: those of Transformers go on for a page."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def unsupported(name: str, why: str) -> EngineError:
    """The error for a class of models that this engine cannot run."""
    return EngineError(
        f"{name} cannot be a draft on the torch engine: {why}; choose a model with full attention in "
        "every layer, such as Llama, Qwen2, Qwen3 or SmolLM2"
    )
