"""`specbranch drain`: let a draft service finish what it has and take nothing new, before it is stopped."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Annotated

import typer

from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson, ServiceKeysDir
from specbranch.cli.source import Outage, ending_at_outage
from specbranch.cli.top_view import count
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.draft_process import why_silent
from specbranch.service.client.interface import client_keys
from specbranch.service.client.transport import Connection, SocketLink
from specbranch.service.wire.messages import Drain, Draining, Refused

_ANSWER_S = 2.0
_PAUSE_S = 0.5


def drain(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The draft service: ipc://PATH, or tcp://HOST:PORT with --keys.")
    ],
    keys: ServiceKeysDir = None,
    wait: Annotated[
        float, typer.Option(metavar="S", help="Wait so many seconds at most until no text is in use.", min=0)
    ] = 0.0,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take new texts again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a draft service finish its texts and take no new ones, so that it can be stopped.

    Targets with several draft services send new texts to the others; a target with this one only decodes them without
    drafts.
    Exit code 1: it does not answer, or after --wait texts are still in use.
    """
    with friendly_errors(SpecBranchError, OSError), ending_at_outage(address, as_json):
        told = _drain(address, keys, not undo, 0.0 if undo else wait)
    if as_json:
        print_json({"address": address, "answers": True, "is_draining": told.is_on, "sessions": told.sessions})
    else:
        state = "takes no new texts" if told.is_on else "takes new texts"
        console_for(False).print(
            f"{address} {state}; {count(told.sessions, 'text')} in use", highlight=False, markup=False, soft_wrap=True
        )
    if wait and told.is_on and told.sessions:
        raise typer.Exit(1)


def _drain(address: str, keys: Path | None, is_on: bool, wait_s: float) -> Draining:
    """What the service says at last; raises `Outage`."""
    end_s = time.monotonic() + wait_s
    link = SocketLink(address, client_keys(str(keys) if keys else None))
    with contextlib.closing(Connection(link)) as connection:
        connection.await_writable(_ANSWER_S)
        for round_number in itertools.count(1):
            told = _ask_to_drain(connection, Drain(round_number, is_on))
            if told is None:
                break
            if not told.sessions or time.monotonic() + _PAUSE_S > end_s:
                return told
            time.sleep(_PAUSE_S)
    raise Outage(why_silent(address, keys) or f"nobody listens at {address}")


def _ask_to_drain(connection: Connection, request: Drain) -> Draining | None:
    if connection.send(request):
        for reply in connection.replies(time.monotonic() + _ANSWER_S):
            if isinstance(reply, Refused):
                raise UsageError(
                    f"the draft service refuses: {reply.reason} (one that is of an older version cannot be drained)"
                )
            if isinstance(reply, Draining) and reply.round == request.round:
                return reply
    return None
