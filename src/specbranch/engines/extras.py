"""Libraries that an engine needs and a plain installation lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specbranch.engines.protocol import EngineError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports of an engine's libraries; one that fails becomes an error that says what to install."""
    try:
        yield
    except ImportError as missing:
        raise EngineError(
            f"the {name} engine cannot import its libraries ({missing}); install them with: "
            f"pip install 'specbranch[{name}]'"
        ) from missing
