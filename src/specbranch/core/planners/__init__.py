"""The registry of planners. A new planner is one new file and one line in `_PLANNERS`.

Other packages add planners with `register_planner`; `specbranch.extensions` finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from specbranch.core.planner import Planner, Predictor, SettingError, Settings, check_name, suggest
from specbranch.core.planners.baselines import AdaedlPlanner, NonePlanner, PearlPlanner, SpsPlanner
from specbranch.core.planners.budget import BudgetPlanner
from specbranch.core.planners.specbranch import SpecbranchPlanner
from specbranch.core.planners.ssd import SsdPlanner

__all__ = [
    "DEFAULT_PLANNER", "PLANNERS", "Planner", "Predictor", "SettingError", "Settings", "draft_length_limit",
    "make_planner", "planner_names", "register_planner", "setting_names", "settings_type", "suggest",
]  # fmt: skip

P = TypeVar("P", bound=type[Planner[Any]])

_PLANNERS: dict[str, type[Planner[Any]]] = {
    "none": NonePlanner,
    "sps": SpsPlanner,
    "adaedl": AdaedlPlanner,
    "pearl": PearlPlanner,
    "ssd": SsdPlanner,
    "specbranch": SpecbranchPlanner,
    "budget": BudgetPlanner,
}

PLANNERS = tuple(_PLANNERS)  # those of this package
DEFAULT_PLANNER = "budget"
_LONGEST = 8  # submission of a planner that has no length of its own


def planner_names() -> tuple[str, ...]:
    """Return the names of all registered planners: those of this package, then those of other packages."""
    return tuple(_PLANNERS)


def register_planner(name: str) -> Callable[[P], P]:
    """Return a decorator that registers a planner class by this name: `@register_planner("mine")`.

    A draft service runs in a process of its own. It finds the class by an entry point of the group
    `specbranch.planners` with the same name; without an entry point the name is known in this process alone.
    """
    check_name("planner", name)

    def register(planner: P) -> P:
        if not (isinstance(planner, type) and issubclass(planner, Planner)):
            raise SettingError(f"planner {name!r} is {planner!r}; give a subclass of specbranch.Planner")
        if _PLANNERS.setdefault(name, planner) is not planner:
            raise SettingError(f"{name!r} is the name of another planner already; choose another name")
        return planner

    return register


def settings_type(name: str) -> type[Settings]:
    """Return the class of the settings of the planner with this name."""
    return _found(name).settings_type


def setting_names(name: str) -> tuple[str, ...]:
    """Return the names of the settings of the planner with this name."""
    found: Any = settings_type(name)
    return _field_names(found)


@functools.cache
def _field_names(settings: type[Settings]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(settings))


def draft_length_limit(name: str) -> int:
    """Return the default `gamma` of the planner with this name: the most draft tokens that it submits at once.

    Return 8 for a planner without this setting.
    """
    return int(getattr(settings_type(name)(), "gamma", _LONGEST))


def make_planner(name: str, settings: Mapping[str, Any], predictor: Predictor) -> Planner[Any]:
    """Return a new planner for one sequence; raise `SettingError` for an unknown name or an invalid value."""
    planner, known = _found(name), setting_names(name)
    for key in settings:
        if key not in known:
            raise SettingError(f"planner {name!r} has no setting {key!r}; {suggest(key, known)}")
    return planner(planner.settings_type(**settings), predictor)


def _found(name: str) -> type[Planner[Any]]:
    if not isinstance(name, str) or name not in _PLANNERS:
        raise SettingError(f"no planner is called {name!r}; {suggest(str(name), planner_names())}")
    return _PLANNERS[name]
