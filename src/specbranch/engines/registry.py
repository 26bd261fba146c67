"""Look up draft engines by name: built-in ones, those that a program registers, and those of installed packages.

A package offers an engine as an entry point of the group `specbranch.engines`. Entry points are loaded only to look up
an unknown name or to list all names. Heavy libraries are imported only when their engine is opened.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from functools import cache

from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.engines.models import local_model
from specbranch.errors import EngineError
from specbranch.extensions import check_extra, iter_entry_points

log = logging.getLogger(__name__)

GROUP = "specbranch.engines"  # of entry points
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")

Opener = Callable[[EngineOptions], DraftEngine]
# Modules that each built-in engine imports.
_MODULES = {"llamacpp": ("llama_cpp",), "torch": ("torch", "transformers")}


def _open_llamacpp(options: EngineOptions) -> DraftEngine:
    from specbranch.engines.llamacpp import LlamaCppEngine

    return LlamaCppEngine(options)


def _open_torch(options: EngineOptions) -> DraftEngine:
    from specbranch.engines.torch import open_torch

    return open_torch(options)


_OPENERS: dict[str, Opener] = {"llamacpp": _open_llamacpp, "torch": _open_torch}


ENGINES = tuple(_OPENERS)  # built-in engines; `engine_names` adds those of other packages


def register_engine(name: str, opener: Opener) -> None:
    """Register an engine under a name. `opener`, a function or a class, makes the engine from `EngineOptions`.

    Raises `EngineError` if the name has other characters than `_NAME` allows or belongs to another opener, or if
    `opener` is not callable.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EngineError(
            f"{name!r} cannot be the name of an engine; use lower-case letters, digits, '-' and '_', a letter first"
        )
    if not callable(opener):
        raise EngineError(f"engine {name!r} cannot be opened: {opener!r} is not callable; give a class or a function")
    if _OPENERS.setdefault(name, opener) is not opener:
        raise EngineError(f"an engine called {name!r} exists already; choose another name")


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines, including those of other packages."""
    _discover()
    return tuple(_OPENERS)


def open_engine(name: str, options: EngineOptions) -> DraftEngine:
    """Open the engine called `name`, which loads the model of the options, and return it."""
    return _opener(name)(options)


def check_engine(name: str) -> None:
    """Raise `EngineError` if no engine has this name, or if a built-in one lacks its libraries."""
    _opener(name)
    check_extra(name, _MODULES.get(name, ()))


def check_device(name: str, device: str) -> None:
    """Raise `EngineError` if a built-in engine cannot use a device, as far as that is known before loading a model."""
    if name == "llamacpp" and device != "cpu":
        from specbranch.engines.llamacpp import model_params

        model_params(device)


def engine_for(model: str) -> str:
    """Return the name of the engine that suits a model: `llamacpp` for GGUF files, `torch` for all others."""
    path = local_model(model)
    if model.endswith(".gguf") or (path is not None and path.is_dir() and any(path.glob("*.gguf"))):
        return "llamacpp"
    return "torch"


def runs_on_gpu(name: str) -> bool:
    """Return whether an engine can use a GPU: for `llamacpp` that depends on its build; all others are assumed to."""
    if name != "llamacpp":
        return True
    from specbranch.engines.llamacpp import supports_gpu

    return supports_gpu()


def _opener(name: str) -> Opener:
    if name in _OPENERS:
        return _OPENERS[name]
    broken = _discover()
    if name in _OPENERS:
        return _OPENERS[name]
    if name in broken:
        raise EngineError(broken[name])
    near = difflib.get_close_matches(name, _OPENERS, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(_OPENERS)}"
    raise EngineError(f"no engine is called {name!r}; {advice}")


@cache
def _discover() -> dict[str, str]:
    """Register the engines of installed packages, once; return the failures, as messages by engine name."""
    broken: dict[str, str] = {}
    for package, point in iter_entry_points(GROUP):
        try:
            register_engine(point.name, point.load())
        except Exception as error:  # code of another package can raise anything
            broken[point.name] = (
                f"the package {package!r} offers a draft engine {point.name!r} that cannot be used "
                f"({type(error).__name__}: {error}); update or uninstall that package"
            )
            log.warning("%s", broken[point.name])
    return broken
