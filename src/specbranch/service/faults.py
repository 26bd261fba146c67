"""Faults that do not spread: what goes wrong in one session costs that session, and is counted."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

from specbranch.service.sessions import DraftSession, SessionStore

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Faults:
    """The exceptions that one thread has caught. The first of each kind is logged, the others are counted only."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._known: set[tuple[type[Exception], CodeType | None, int]] = set()
        self.count = 0

    def contain(self, session: DraftSession, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do something for a draft. If it fails, the draft is forgotten, and None comes of it."""
        try:
            return act(*args, **kwargs)
        except Exception as error:
            self.drop(session, error)
            return None

    def drop(self, session: DraftSession, error: Exception) -> None:
        """Forget the draft that a fault came from. Its sequence is opened anew if it goes on."""
        self.note(error, f"session {session.number} is forgotten")
        self._store.forget(session)

    def note(self, error: Exception, loss: str) -> None:
        """Count a fault; `loss` says what it costs."""
        self.count += 1
        kind = _kind(error)
        if kind not in self._known:
            self._known.add(kind)
            # An error's words may come from outside: they are cut, and cannot break the line.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s; more of its kind are only counted\n%s", loss, repr(error)[:200], trace)


def _kind(error: Exception) -> tuple[type[Exception], CodeType | None, int]:
    """What was raised, and where."""
    code, line = None, 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        code, line = frame.f_code, number
    return type(error), code, line
