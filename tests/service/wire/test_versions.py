"""Two versions of the wire: what the one before looked like, what both sides agree on, and both packages as processes.

`frames-12.json` has messages as version 12 wrote them, and the names of their fields. It is never written anew.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbranch.service.client.client import AgreedVersion, DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.wire import messages
from specbranch.service.wire.messages import (
    OLDEST_VERSION,
    VERSION,
    DraftReply,
    Draining,
    ErrorReply,
    FrameError,
    Hello,
    OpenSequences,
    Reply,
    Request,
    Rest,
    Welcome,
    common_version,
    decode_reply,
    decode_request,
    encode,
)
from tests.root import ROOT
from tests.service.harness import PATIENCE_S, IdleTransport, Service, running
from tests.service.server.test_lookup import Bench

OLD: dict[str, Any] = json.loads((ROOT / "tests" / "service" / "wire" / f"frames-{OLDEST_VERSION}.json").read_text())
SOURCE = "src/specbranch/service/wire/messages.py"
MIN_ACCEPTED = 20  # draft tokens, in each pair of versions


def decoded(frame: bytes) -> Request | Reply:
    try:
        return decode_request(frame)
    except FrameError:
        return decode_reply(frame)


@pytest.mark.parametrize(
    ("name", "frame"), OLD["frames"], ids=[f"{name}-{len(frame)}" for name, frame in OLD["frames"]]
)
def test_a_frame_of_the_version_before_is_read_and_written_as_it_was(name: str, frame: str) -> None:
    message = decoded(bytes.fromhex(frame))

    assert type(message).__name__ == name
    assert encode(message, OLDEST_VERSION).hex() == frame


def test_fields_were_only_appended_since_the_version_before() -> None:
    found = {name: list(getattr(messages, name).__struct_fields__[: len(old)]) for name, old in OLD["fields"].items()}

    assert found == OLD["fields"]


def test_frames_are_kept_of_every_message_of_the_version_before() -> None:
    every = {type_.__name__ for type_ in (*Request.__args__, *Reply.__args__)}

    assert every & OLD["fields"].keys() <= {name for name, _ in OLD["frames"]}


@pytest.mark.parametrize(
    ("newest", "oldest", "agreed"),
    [
        (VERSION, OLDEST_VERSION, VERSION),
        (OLDEST_VERSION, None, OLDEST_VERSION),
        (VERSION + 1, VERSION, VERSION),
        (OLDEST_VERSION, OLDEST_VERSION - 1, OLDEST_VERSION),
        (VERSION + 2, VERSION + 1, None),
        (VERSION + 1, None, None),
        (OLDEST_VERSION - 1, None, None),
    ],
)
def test_a_service_answers_in_the_newest_version_that_both_speak(
    newest: int, oldest: int | None, agreed: int | None
) -> None:
    (reply,) = Bench().ask(Hello(newest, 7, oldest))

    assert common_version(Hello(newest, 7, oldest)) == agreed
    if agreed is None:
        assert isinstance(reply, ErrorReply) and "update the older one" in reply.reason
    else:
        assert isinstance(reply, Welcome) and (reply.version, reply.round) == (agreed, 7)


def test_a_client_is_written_to_in_its_version_and_before_its_greeting_in_the_oldest() -> None:
    bench = Bench()
    tenants = bench.handler.lookup.tenants
    bench.ask(Hello(VERSION, 1, OLDEST_VERSION))

    assert tenants.version(b"me") == VERSION
    assert tenants.version(b"other") == OLDEST_VERSION
    bench.ask(Hello(OLDEST_VERSION, 2))
    assert tenants.version(b"me") == OLDEST_VERSION


def test_a_newer_field_is_left_out_for_an_older_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = DraftReply(8, [[1, 2], []], [], [1])
    whole = encode(reply)
    monkeypatch.setattr(messages, "_NUM_FIELDS", {OLDEST_VERSION: {DraftReply: 2}})

    assert decode_reply(encode(reply, OLDEST_VERSION)) == DraftReply(8, [[1, 2], []])
    assert encode(reply, VERSION) == whole and decode_reply(whole) == reply


def test_a_client_that_is_refused_greets_in_the_oldest_version() -> None:
    """It has greeted three times before the first refusal came; none of the three is an error of its service."""
    agreed = AgreedVersion()
    assert [agreed.hello(number) for number in (1, 2, 3)] == [
        Hello(VERSION, number, OLDEST_VERSION) for number in (1, 2, 3)
    ]
    assert [agreed.is_refusal(reply) for reply in (Draining(0, True, 1), None, *[ErrorReply("old")] * 4)] == [
        *(False, False),
        *(True, True, True),
        False,
    ]
    assert agreed.hello(4) == Hello(OLDEST_VERSION, 4) and not agreed.is_agreed
    agreed.agree(Welcome(OLDEST_VERSION, 4, "old", 50))

    assert agreed.version == OLDEST_VERSION and agreed.is_agreed


def test_once_agreed_an_error_is_one_of_the_service() -> None:
    agreed = AgreedVersion()
    agreed.hello(1)
    assert agreed.version == OLDEST_VERSION
    agreed.agree(Welcome(VERSION, 1, "new", 50))

    assert agreed.version == VERSION
    assert not agreed.is_refusal(ErrorReply("no planner is called x"))


class Kept(IdleTransport):
    """A transport that keeps what is sent; nothing comes but `replies`."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.replies: list[list[bytes]] = []

    def send(self, frame: bytes) -> bool:
        self.frames.append(frame)
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        found, self.replies = self.replies, []
        return found


def test_a_client_offers_both_versions_before_anything_else() -> None:
    transport = Kept()
    client = DraftClient(ClientOptions("ipc:///nowhere", "pearl"), transport=transport)
    client.announce_prompts([[1, 2]])
    first, second = map(decode_request, transport.frames)

    assert first == Hello(VERSION, 0, OLDEST_VERSION)
    assert isinstance(second, OpenSequences)


@pytest.mark.parametrize("version", [OLDEST_VERSION, VERSION])
def test_only_a_service_that_knows_rest_is_told_to(version: int) -> None:
    transport = Kept()
    client = DraftClient(ClientOptions("ipc:///nowhere", "pearl"), transport=transport)
    client.rest()
    assert not transport.frames, "nothing is agreed yet"
    transport.replies = [[encode(Welcome(version, 0, "model", 50))]]
    client.connection.drain_replies(0.0)
    client.rest()

    assert list(map(decode_request, transport.frames)) == ([Rest(client.namespace)] if version == VERSION else [])


def test_an_error_that_was_taken_for_a_refusal_costs_no_version() -> None:
    """It was on its way already when the client greeted anew."""
    agreed = AgreedVersion()
    agreed.hello(1)
    assert agreed.is_refusal(ErrorReply("no planner is called x"))
    agreed.agree(Welcome(VERSION, 1, "new", 50))

    assert agreed.hello(2) == Hello(VERSION, 2, OLDEST_VERSION)


def git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


def version_at(commit: str) -> int | None:
    lines = git("show", f"{commit}:{SOURCE}").decode().splitlines()
    return next((int(line.split()[-1]) for line in lines if line.startswith("VERSION = ")), None)


@pytest.fixture(scope="module")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source and the tests of the last commit that speaks the version before as its newest one."""
    change = git("log", "-1", "--format=%H", "-G^VERSION = ", "--", SOURCE).decode().strip()
    commit = next((one for one in ("HEAD", f"{change}^") if version_at(one) == OLDEST_VERSION), None)
    if commit is None:
        pytest.skip(f"git history has no commit whose newest version of the wire is {OLDEST_VERSION}")
    place = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "src", "tests"))) as archive:
        archive.extractall(place, filter="data")
    return place


CLIENT = """
import contextlib, json, sys, time
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.wire.messages import VERSION
from tests.service.harness import Walk

address, min_accepted, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
options = ClientOptions(address, "pearl", {"gamma": 4}, deadline_s=1.0, vocab_len=50)
with contextlib.closing(DraftClient(options)) as client:
    walk, end_s = Walk(client, [1, 2]), time.monotonic() + patience_s
    while walk.num_accepted < min_accepted and time.monotonic() < end_s:
        walk.step()
    walk.assert_text_is_the_targets()
    welcome = client.hello(patience_s)
    print(json.dumps({
        "speaks": VERSION,
        "agreed": welcome.version,
        "accepted": walk.num_accepted,
        "errors": [client.counts.refused, client.counts.faults, client.counts.other_vocab],
    }))
"""


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(place / "src"), "OMP_NUM_THREADS": "1"}


def drafts_for(client: Path, address: str) -> dict[str, Any]:
    """What a client of the package in this directory gets from the service at the address."""
    words = [sys.executable, "-c", CLIENT, address, str(MIN_ACCEPTED), str(PATIENCE_S)]
    done = subprocess.run(words, cwd=client, env=environment(client), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class ServiceOf(Service):
    """A scripted service of the package in another directory."""

    def __init__(self, place: Path, address: str) -> None:
        super().__init__([sys.executable, "-m", "tests.service.scripted_service", "--listen", address], address)
        self._place = place

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=self._place, env=environment(self._place))


@pytest.fixture(params=["old client", "new client"])
def pair(request: pytest.FixtureRequest, old_package: Path) -> Iterator[tuple[Path, Path]]:
    """The packages of client and service, one of each version."""
    yield (old_package, ROOT) if request.param == "old client" else (ROOT, old_package)


def test_client_and_service_of_neighbouring_versions_exchange_drafts(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    client, service = pair
    with running(ServiceOf(service, f"ipc://{tmp_path}/draft.sock")) as up:
        found = drafts_for(client, up.address)

    assert found["accepted"] >= MIN_ACCEPTED
    assert found["agreed"] == OLDEST_VERSION
    assert found["speaks"] == (VERSION if client == ROOT else OLDEST_VERSION)
    assert found["errors"] == [0, 0, 0]


def test_two_of_the_same_version_agree_on_the_newest(tmp_path: Path) -> None:
    with running(ServiceOf(ROOT, f"ipc://{tmp_path}/draft.sock")) as up:
        found = drafts_for(ROOT, up.address)

    assert (found["speaks"], found["agreed"], found["errors"]) == (VERSION, VERSION, [0, 0, 0])
