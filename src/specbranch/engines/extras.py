"""Libraries that an engine needs and a plain installation lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from specbranch.engines.protocol import EngineError

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# On PyPI torch comes with several gigabytes for CUDA.
_MORE = {"torch": f" (without GPUs add --extra-index-url {TORCH_CPU_INDEX})"}


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports of an engine's libraries; one that fails becomes an error that says what to install."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as missing:  # also a library that lacks another, such as CUDA's
        raise _missing(name, str(missing)) from missing


def require_extra(name: str, modules: tuple[str, ...]) -> None:
    """Raise the same error for a module that is not installed; nothing is imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(name, f"No module named {module!r}")


def _missing(name: str, cause: str) -> EngineError:
    return EngineError(
        f"the {name} engine cannot import its libraries ({cause}); install them with: pip install 'specbranch[{name}]'"
        + _MORE.get(name, "")
    )
