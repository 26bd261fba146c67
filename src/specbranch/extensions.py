"""Planners of other packages, found by their entry points.

A package names its planner class in its pyproject.toml:

    [project.entry-points."specbranch.planners"]
    mine = "my_package:MyPlanner"

Then `mine` is a planner wherever a name is asked for: in the simulator, in a draft service, in vLLM. Engines join in
the same way by the group `specbranch.engines` (`specbranch.engines.registry`).
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points

from specbranch.core.planners import register_planner

log = logging.getLogger(__name__)

PLANNERS_GROUP = "specbranch.planners"


@cache
def load_planners() -> None:
    """Register the planners of all installed packages, once. One that cannot be loaded is left out with a warning."""
    for point in entry_points(group=PLANNERS_GROUP):
        try:
            register_planner(point.name)(point.load())
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            log.warning("planner %r of package %s cannot be used: %s", point.name, package, error)
