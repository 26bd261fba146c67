"""Branch-parallel speculative decoding: while the target verifies draft tokens, the draft model drafts what may follow.

Everything in `__all__` is public and stable: it changes only with a notice in the changelog. Names are loaded on first
use, so `import specbranch` is fast and needs no optional dependency.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specbranch.version import __version__

if TYPE_CHECKING:
    from specbranch.core.node import Node
    from specbranch.core.planner import Rows, Share, Window
    from specbranch.core.planners import Planner, Predictor, Settings, register_planner
    from specbranch.core.planners.predictors import register_predictor
    from specbranch.core.round import Round, Signal
    from specbranch.draft_server import DraftServer
    from specbranch.engines.base import DraftEngine
    from specbranch.engines.registry import register_engine
    from specbranch.errors import SpecBranchError
    from specbranch.simulation.presets import PAIRS, ModelPair, make_trace
    from specbranch.simulation.simulate import Layout, Method, simulate
    from specbranch.trace import Trace


__all__ = [
    "PAIRS",
    "DraftEngine",
    "DraftServer",
    "Layout",
    "Method",
    "ModelPair",
    "Node",
    "Planner",
    "Predictor",
    "Round",
    "Rows",
    "Settings",
    "Share",
    "Signal",
    "SpecBranchError",
    "Trace",
    "Window",
    "__version__",
    "make_trace",
    "register_engine",
    "register_planner",
    "register_predictor",
    "simulate",
]

_HOMES = {
    "DraftEngine": "specbranch.engines.base",
    "DraftServer": "specbranch.draft_server",
    "Layout": "specbranch.simulation.simulate",
    "Method": "specbranch.simulation.simulate",
    "ModelPair": "specbranch.simulation.presets",
    "Node": "specbranch.core.node",
    "PAIRS": "specbranch.simulation.presets",
    "Planner": "specbranch.core.planners",
    "Predictor": "specbranch.core.planners",
    "Round": "specbranch.core.round",
    "Rows": "specbranch.core.planner",
    "Settings": "specbranch.core.planners",
    "Share": "specbranch.core.planner",
    "Signal": "specbranch.core.round",
    "SpecBranchError": "specbranch.errors",
    "Trace": "specbranch.trace",
    "Window": "specbranch.core.planner",
    "make_trace": "specbranch.simulation.presets",
    "register_engine": "specbranch.engines.registry",
    "register_planner": "specbranch.core.planners",
    "register_predictor": "specbranch.core.planners.predictors",
    "simulate": "specbranch.simulation.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
