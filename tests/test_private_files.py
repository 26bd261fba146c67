"""Where sockets lie: what somebody else could have put there is neither listened at nor connected to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specbranch.plugins.vllm.stats_file import RUN, PublishedStats, open_stats_file, read_stats_files
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.wire.addresses import AddressError, default_address
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.harness import DRAFT, PATIENCE_S, LeapingClock, scripted_service

STRANGER = 54_321
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")


def serve(address: str) -> None:
    server = Server(ScriptedEngine(DRAFT), ServiceOptions(address))
    server.stop()
    server.serve()


def connect(address: str) -> None:
    DraftClient(ClientOptions(address)).close()


SIDES = pytest.mark.parametrize("side", [serve, connect])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default directory of this user, not yet made."""
    directory = tmp_path / "own"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


@SIDES
def test_whoever_comes_first_makes_the_default_directory_for_its_owner_only(
    own: Path, side: Callable[[str], None]
) -> None:
    side(default_address())

    assert own.stat().st_mode & 0o7777 == 0o700
    side(default_address())


@SIDES
@pytest.mark.parametrize("mode", [0o710, 0o705, 0o777, 0o1777])
def test_a_default_directory_that_others_can_reach_is_refused(
    own: Path, side: Callable[[str], None], mode: int
) -> None:
    own.mkdir()
    own.chmod(mode)

    with pytest.raises(AddressError, match=f"can be reached by others .mode {mode:o}.*chmod 700"):
        side(default_address())


@needs_root
@SIDES
def test_a_default_directory_of_somebody_else_is_refused(own: Path, side: Callable[[str], None]) -> None:
    own.mkdir(mode=0o700)
    os.chown(own, STRANGER, STRANGER)

    with pytest.raises(AddressError, match=f"belongs to user {STRANGER}.*XDG_RUNTIME_DIR"):
        side(default_address())


@SIDES
def test_a_link_in_the_place_of_the_default_directory_is_refused(
    own: Path, tmp_path: Path, side: Callable[[str], None]
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(AddressError, match="is a symbolic link"):
        side(default_address())


@SIDES
def test_a_default_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: Callable[[str], None]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file" / "own"))

    with pytest.raises(AddressError, match="cannot be created"):
        side(default_address())


@SIDES
def test_a_chosen_directory_may_be_read_by_others_but_not_written(tmp_path: Path, side: Callable[[str], None]) -> None:
    for mode in (0o755, 0o775, 0o1777):
        tmp_path.chmod(mode)
        side(f"ipc://{tmp_path}/draft.sock")
    tmp_path.chmod(0o777)

    with pytest.raises(AddressError, match=f"anybody can replace.*ipc://{tmp_path}/specbranch/draft.sock"):
        side(f"ipc://{tmp_path}/draft.sock")
    serve(f"ipc://{tmp_path}/specbranch/draft.sock")


@needs_root
@SIDES
def test_a_chosen_directory_of_somebody_else_is_refused(tmp_path: Path, side: Callable[[str], None]) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)

    with pytest.raises(AddressError, match=f"belongs to user {STRANGER}"):
        side(f"ipc://{tmp_path}/theirs/draft.sock")


@needs_root
@SIDES
def test_a_socket_of_somebody_else_in_a_directory_for_all_is_refused(
    tmp_path: Path, side: Callable[[str], None]
) -> None:
    tmp_path.chmod(0o1777)
    with scripted_service(tmp_path) as service:
        os.chown(tmp_path / "draft.sock", STRANGER, STRANGER)
        with pytest.raises(AddressError, match=f"draft.sock belongs to user {STRANGER}"):
            side(service.address)


def test_a_directory_that_appears_later_is_looked_at_before_it_is_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody connects to a socket in it meanwhile; once it is in order, drafts come."""
    clock = LeapingClock()
    options = ClientOptions(f"ipc://{tmp_path}/later/draft.sock")
    with contextlib.closing(DraftClient(options, clock=clock)) as client:
        (tmp_path / "later").mkdir()
        with scripted_service(tmp_path / "later"):
            (tmp_path / "later").chmod(0o777)
            for _ in range(3):
                clock.leap(7.0)  # longer than the client takes to look again
                client.propose([SequenceUpdate([1, 2, 3], 1)])
            assert caplog.text.count("no connection to the draft service") == 3
            assert client.counts.answered == client.counts.faults == 0
            (tmp_path / "later").chmod(0o700)
            clock.leap(7.0)

            assert client.hello(PATIENCE_S)


def test_stats_files_are_neither_written_to_nor_read_from_a_directory_that_others_can_reach(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RUN, "r1")
    first = open_stats_file(lambda: ("target", 0))
    assert first is not None
    first.publish(PublishedStats(model="target", engine=0, address="ipc:///nowhere", namespace=b"ours"))
    assert [shown.model for shown in read_stats_files("r1")] == ["target"]
    own.chmod(0o777)

    assert list(read_stats_files("r1")) == []
    assert open_stats_file(lambda: ("target", 0)) is None
    assert "can be reached by others" in caplog.text
