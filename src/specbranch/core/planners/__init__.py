"""Every method behind one protocol. A new planner is one new file and one line in `_MAKERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from specbranch.core.planners.adaedl import AdaedlPlanner, AdaedlSettings
from specbranch.core.planners.budget import BudgetPlanner, BudgetSettings
from specbranch.core.planners.none import NonePlanner
from specbranch.core.planners.pearl import PearlPlanner, PearlSettings
from specbranch.core.planners.protocol import Planner, Predictor
from specbranch.core.planners.settings import SettingError, Settings, suggest
from specbranch.core.planners.specbranch import SpecbranchPlanner, SpecbranchSettings
from specbranch.core.planners.sps import SpsPlanner, SpsSettings
from specbranch.core.planners.ssd import SsdPlanner, SsdSettings

__all__ = ["PLANNERS", "Planner", "Predictor", "SettingError", "make_planner", "setting_names", "suggest"]

# name: (its settings, how to make it from them and a predictor)
_MAKERS: dict[str, tuple[type[Settings], Callable[[Any, Predictor], Planner]]] = {
    "none": (Settings, lambda settings, predictor: NonePlanner()),
    "sps": (SpsSettings, lambda settings, predictor: SpsPlanner(settings)),
    "adaedl": (AdaedlSettings, lambda settings, predictor: AdaedlPlanner(settings)),
    "pearl": (PearlSettings, lambda settings, predictor: PearlPlanner(settings)),
    "ssd": (SsdSettings, lambda settings, predictor: SsdPlanner(settings)),
    "specbranch": (SpecbranchSettings, SpecbranchPlanner),
    "budget": (BudgetSettings, lambda settings, predictor: BudgetPlanner(settings)),
}

PLANNERS = tuple(_MAKERS)


def setting_names(name: str) -> tuple[str, ...]:
    """The settings that a planner takes."""
    if name not in _MAKERS:
        raise SettingError(f"no planner is called {name!r}; {suggest(name, PLANNERS)}")
    settings, _ = _MAKERS[name]
    return tuple(field.name for field in fields(settings))


def make_planner(name: str, settings: Mapping[str, Any], predictor: Predictor) -> Planner:
    """A fresh planner for one sequence. Unknown names raise, with the nearest known one, and so do bad values."""
    known = setting_names(name)
    for key in settings:
        if key not in known:
            raise SettingError(f"planner {name!r} has no setting {key!r}; {suggest(key, known)}")
    kind, make = _MAKERS[name]
    return make(kind(**settings), predictor)
