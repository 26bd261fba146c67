"""Branch-parallel speculative decoding: while the target verifies draft tokens, the draft model drafts what may follow.

Everything in `__all__` is public and stable: it changes only with a notice in the changelog. Names are loaded on first
use, so `import specbranch` is fast and needs no optional dependency.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specbranch.version import __version__

if TYPE_CHECKING:
    from specbranch.core.planners import Planner, Settings, register_planner
    from specbranch.draft_server import DraftServer
    from specbranch.engines.base import DraftEngine
    from specbranch.engines.registry import register_engine
    from specbranch.errors import SpecBranchError
    from specbranch.simulation.simulate import simulate
    from specbranch.trace import Trace


__all__ = [
    "DraftEngine",
    "DraftServer",
    "Planner",
    "Settings",
    "SpecBranchError",
    "Trace",
    "__version__",
    "register_engine",
    "register_planner",
    "simulate",
]

_HOMES = {
    "DraftEngine": "specbranch.engines.base",
    "DraftServer": "specbranch.draft_server",
    "Planner": "specbranch.core.planners",
    "Settings": "specbranch.core.planners",
    "SpecBranchError": "specbranch.errors",
    "Trace": "specbranch.trace",
    "register_engine": "specbranch.engines.registry",
    "register_planner": "specbranch.core.planners",
    "simulate": "specbranch.simulation.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
