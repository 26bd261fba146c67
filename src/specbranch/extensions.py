"""Load what other packages provide: planners and predictors by entry points, and libraries that only extras install.

A package names its class in its pyproject.toml:

    [project.entry-points."specbranch.planners"]
    mine = "my_package:MyPlanner"

Then `mine` can be used wherever a planner is named: in the simulator, in a draft service, in vLLM. Predictors use the
group `specbranch.predictors` in the same way, and engines `specbranch.engines` (`specbranch.engines.registry`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import Any

from specbranch.core.planners import register_planner
from specbranch.core.planners.predictors import register_predictor
from specbranch.errors import EngineError

log = logging.getLogger(__name__)

_GROUPS = {"planner": register_planner, "predictor": register_predictor}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# From PyPI, torch comes with several gigabytes for CUDA.
_MORE = {"torch": f" (without GPUs add --extra-index-url {TORCH_CPU_INDEX})"}


@cache
def load_extensions() -> None:
    """Register the planners and predictors that installed packages provide; further calls do nothing.

    A class that cannot be loaded is skipped, and a warning is logged.
    """
    for kind, register in _GROUPS.items():
        for package, point in iter_entry_points(f"specbranch.{kind}s"):
            try:
                register(point.name)(point.load())
            except Exception as error:  # code of another package can raise anything
                log.warning("%s %r of package %s cannot be used: %s", kind, point.name, package, error)


def iter_entry_points(group: str) -> Iterator[tuple[str, EntryPoint]]:
    """Yield (package name, entry point) for each entry point of `group` in the installed packages.

    Of two installed copies of a package, only the first counts. If the entry points of a package cannot be read, log a
    warning and skip the package.
    """
    seen: set[str] = set()
    # One package at a time: `entry_points()` fails as a whole if one of them has a damaged file.
    for package in distributions():
        damage, points = None, []
        try:
            points = list(package.entry_points.select(group=group))
        except Exception as error:
            damage = error
        if (not points and damage is None) or package.name in seen:
            continue
        seen.add(package.name)
        if damage is not None:
            log.warning("ignoring the package %r: its entry points cannot be read (%s)", package.name, damage)
        yield from ((package.name, point) for point in points)


@contextmanager
def optional_import(name: str) -> Iterator[None]:
    """Turn a failed import inside `with` into an `EngineError` that says to install the extra `name`."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as missing:  # a library may also lack another, such as CUDA's
        raise _missing(name, str(missing)) from missing


def check_extra(name: str, modules: tuple[str, ...]) -> None:
    """Raise `EngineError`, which says to install the extra `name`, if one of `modules` is missing; import no module."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(name, f"No module named {module!r}")


def _missing(name: str, cause: str) -> EngineError:
    return EngineError(
        f"the {name} engine cannot import its libraries ({cause}); install them with: pip install 'specbranch[{name}]'"
        + _MORE.get(name, "")
    )


def load_pyplot() -> Any:
    """Import Matplotlib's pyplot, make it draw to files only, and return it; raise ImportError without Matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'specbranch[bench]'") from error
    return pyplot
