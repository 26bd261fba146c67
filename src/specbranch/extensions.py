"""Planners of other packages, found by their entry points.

A package names its planner class in its pyproject.toml:

    [project.entry-points."specbranch.planners"]
    mine = "my_package:MyPlanner"

Then `mine` is a planner wherever a name is asked for: in the simulator, in a draft service, in vLLM. Engines join in
the same way by the group `specbranch.engines` (`specbranch.engines.registry`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, distributions

from specbranch.core.planners import register_planner

log = logging.getLogger(__name__)

PLANNERS_GROUP = "specbranch.planners"


@cache
def load_planners() -> None:
    """Register the planners of all installed packages, once. One that cannot be loaded is left out with a warning."""
    for package, point in offers(PLANNERS_GROUP):
        try:
            register_planner(point.name)(point.load())
        except Exception as error:  # code of another package: anything can go wrong in it
            log.warning("planner %r of package %s cannot be used: %s", point.name, package, error)


def offers(group: str) -> Iterator[tuple[str, EntryPoint]]:
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
