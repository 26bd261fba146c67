"""What other packages bring: planners by entry points, and libraries that only some extras install.

A package names its planner class in its pyproject.toml:

    [project.entry-points."specbranch.planners"]
    mine = "my_package:MyPlanner"

Then `mine` is a planner wherever a name is asked for: in the simulator, in a draft service, in vLLM. Engines join in
the same way by the group `specbranch.engines` (`specbranch.engines.registry`).
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
from specbranch.errors import EngineError

log = logging.getLogger(__name__)

PLANNERS_GROUP = "specbranch.planners"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# On PyPI torch comes with several gigabytes for CUDA.
_MORE = {"torch": f" (without GPUs add --extra-index-url {TORCH_CPU_INDEX})"}


@cache
def load_planners() -> None:
    """Register the planners of all installed packages, once. One that cannot be loaded is left out with a warning."""
    for package, point in has_entry_point(PLANNERS_GROUP):
        try:
            register_planner(point.name)(point.load())
        except Exception as error:  # code of another package: anything can go wrong in it
            log.warning("planner %r of package %s cannot be used: %s", point.name, package, error)


def has_entry_point(group: str) -> Iterator[tuple[str, EntryPoint]]:
    """Entry points of a group, with the names of their packages; of two copies of a package only the first."""
    seen: set[str] = set()
    # Package by package: `entry_points()` fails as a whole if one of them has a damaged file.
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
    """Imports of an engine's libraries; one that fails becomes an error that says what to install."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as missing:  # also a library that lacks another, such as CUDA's
        raise _missing(name, str(missing)) from missing


def check_extra(name: str, modules: tuple[str, ...]) -> None:
    """Raise the same error for a module that is not installed; nothing is imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(name, f"No module named {module!r}")


def _missing(name: str, cause: str) -> EngineError:
    return EngineError(
        f"the {name} engine cannot import its libraries ({cause}); install them with: pip install 'specbranch[{name}]'"
        + _MORE.get(name, "")
    )


def load_pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'specbranch[bench]'") from error
    return pyplot
