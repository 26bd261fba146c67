"""The service's socket: whose file it is, what happens when it is lost, and when descriptors run out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.server.listener import SocketFile, listening, lowest_free_fd
from specbranch.service.wire.addresses import AddressError
from tests.service.harness import PATIENCE_S, Service, Walk, scripted_service
from tests.service.test_faults import client_for, walk_until_accepted


def until(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def answers(address: str, timeout_s: float = PATIENCE_S) -> bool:
    with contextlib.closing(DraftClient(ClientOptions(address))) as client:
        return client.hello(timeout_s) is not None


def bound(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(str(path))
    return one


def test_a_file_is_hidden_shown_and_removed_by_its_inode(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    with contextlib.closing(bound(path)):
        file = SocketFile(path)
        assert file.is_ours and not file.show()
        assert file.hide() and not path.exists() and file.is_ours and not file.hide()
        assert file.show() and path.exists() and file.is_ours
        file.remove()

        assert not list(tmp_path.iterdir())


def test_a_file_that_others_put_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    with contextlib.closing(bound(path)):
        file = SocketFile(path)
        path.rename(tmp_path / "kept")  # its inode is not used again
        with contextlib.closing(bound(path)):
            assert not file.is_ours and not file.hide()
            file.remove()

            assert path.exists()


def test_a_socket_that_was_replaced_ends_the_listener_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with listening(context, f"ipc://{path}") as listener:
        listener.check()
        path.rename(tmp_path / "kept")
        with contextlib.closing(bound(path)), pytest.raises(AddressError, match="another service listens there"):
            listener.check()
    context.term()

    assert path.exists()


def test_a_deleted_socket_is_made_again_and_nobody_loses_the_connection(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service, contextlib.closing(client_for(service.address)) as client:
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)
        opened, unreachable = client.counts.opened, client.counts.unreachable
        (tmp_path / "draft.sock").unlink()
        until((tmp_path / "draft.sock").exists, "the service does not notice")
        walk_until_accepted(walk)

        assert answers(service.address)
        assert (client.counts.opened, client.counts.unreachable) == (opened, unreachable)
    assert not (tmp_path / "draft.sock").exists()


def test_the_lowest_free_descriptor_tells_how_many_are_in_use() -> None:
    before = lowest_free_fd()
    copy = os.dup(0)
    try:
        assert copy == before < lowest_free_fd()
    finally:
        os.close(copy)


def test_more_connections_than_descriptors_leave_the_service_alive_and_go_after_a_while(tmp_path: Path) -> None:
    with (
        scripted_service(tmp_path, "--max-files", "1024") as service,
        contextlib.closing(client_for(service.address)) as client,
        contextlib.ExitStack() as held,
    ):
        walk, path = Walk(client, [1, 2]), tmp_path / "draft.sock"
        walk_until_accepted(walk)
        while path.exists():
            one = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # it was hidden just now
                one.connect(str(path))
            assert one.fileno() < 1000, "the service takes any number of clients"
        walk_until_accepted(walk)

        assert service.process is not None and service.process.poll() is None
        until(path.exists, "connections that never speak are kept for ever")
        assert answers(service.address)
    assert not list(tmp_path.iterdir())


def ended(service: Service) -> int:
    assert service.process is not None
    return service.process.wait(PATIENCE_S)


def test_a_service_that_has_lost_its_engine_ends_with_an_error(tmp_path: Path) -> None:
    with (
        scripted_service(tmp_path, "--lost-step", "20") as service,
        contextlib.closing(client_for(service.address)) as client,
    ):
        walk, end_s = Walk(client, [1, 2]), time.monotonic() + PATIENCE_S
        assert service.process is not None
        while service.process.poll() is None:
            assert time.monotonic() < end_s, "the service lives on without an engine"
            walk.step()
            time.sleep(0.01)

        assert service.process.returncode == 1
        walk.assert_text_is_the_targets()


def test_a_service_whose_engine_hangs_ends_on_sigterm(tmp_path: Path) -> None:
    with (
        scripted_service(tmp_path, "--hung-step", "20", "--hung-file", str(tmp_path / "hung")) as service,
        contextlib.closing(client_for(service.address)) as client,
    ):
        walk = Walk(client, [1, 2])
        walk.step_until((tmp_path / "hung").exists)
        service.signal(signal.SIGTERM)

        assert ended(service) == 1
        assert not (tmp_path / "draft.sock").exists()
