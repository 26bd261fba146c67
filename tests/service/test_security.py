"""Who may reach a service, and what bad input does to a live one."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.commands.draft import reload_keys_on_hangup
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import ServiceStatus, StatsClient
from specbranch.service.client.transport import dealer_socket
from specbranch.service.server.listener import ClientKeyring
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.wire.addresses import AddressError, ClientKeys, ServiceKeys, default_address, make_keys
from specbranch.service.wire.messages import VERSION, ErrorReply, Hello, Welcome, decode_reply, encode
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.client.test_stats import ask_until
from tests.service.harness import DRAFT, PATIENCE_S, Walk, free_port, scrape, scripted_service, tcp_service, wait_for
from tests.service.server.test_lookup import Bench
from tests.service.test_faults import client_for, walk_until_accepted
from tests.service.wire.test_messages import REQUESTS, mutate

_LAST = 987_654_321  # a round that no mutated frame has


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_ten_thousand_mutated_frames_leave_a_live_service_well_and_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    rng, port = random.Random(2), free_port()
    frames = [encode(message) for message in REQUESTS]
    arguments = ("--metrics-port", str(port), "--max-sessions", "64")
    with scripted_service(tmp_path, *arguments) as service, contextlib.closing(client_for(service.address)) as client:
        assert service.process is not None
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)
        before = resident_bytes(service.process.pid)
        mutated = [mutate(frames[i % len(frames)], rng) for i in range(10_000)]
        refusals = flood(service.address, mutated)
        walk_until_accepted(walk)

        assert service.process.poll() is None
        refused = num_refused(mutated)
        assert refused > 5_000
        assert 0 < refusals <= refused  # what a client is slow to take is dropped
        wait_for(lambda: scrape(port, "specbranch_draft_refused_frames_total") == refused)  # read once a second
        assert scrape(port, "specbranch_draft_sessions") <= 64
        assert resident_bytes(service.process.pid) - before < 64 << 20
        walk.assert_text_is_the_targets()


def num_refused(frames: list[bytes]) -> int:
    """How many of these a lookup refuses, without a wire."""
    lookup = Bench().handler
    for frame in frames:
        list(lookup.handle(b"me", [frame]))
    return lookup.counts.refused


def flood(address: str, frames: list[bytes]) -> int:
    """Send frames as fast as they are taken; return how many refusals were heard."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = dealer_socket(context, address)
    dealer.setsockopt(zmq.RCVHWM, 0)
    refusals = 0
    try:
        for frame in frames:
            while True:
                try:
                    dealer.send(frame, zmq.NOBLOCK)
                    break
                except zmq.Again:
                    dealer.poll(10)
                    refusals += _refusals(dealer)
            refusals += _refusals(dealer)
        refusals += _last_refusals(dealer)
    finally:
        context.destroy(linger=0)
    return refusals


def _last_refusals(dealer: zmq.Socket[bytes]) -> int:
    """Refusals up to the answer to a greeting, sent again if none comes: what a client is slow to take is dropped."""
    refusals = 0
    while True:
        dealer.send(encode(Hello(VERSION, _LAST)))
        while dealer.poll(2000):
            reply = decode_reply(dealer.recv())
            if isinstance(reply, Welcome) and reply.round == _LAST:
                return refusals
            refusals += isinstance(reply, ErrorReply)


def _refusals(dealer: zmq.Socket[bytes]) -> int:
    found = 0
    while dealer.poll(0):
        found += isinstance(decode_reply(dealer.recv()), ErrorReply)
    return found


def test_a_frame_beyond_the_bound_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service, contextlib.closing(client_for(service.address)) as client:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = dealer_socket(context, service.address)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.send(b"x" * (9 << 20))
        assert monitor.poll(int(1000 * PATIENCE_S))
        dealer.disable_monitor()
        context.destroy(linger=0)
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)

        walk.assert_text_is_the_targets()


def test_over_tcp_the_right_key_is_served_and_a_wrong_one_gets_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    service = ServiceKeys(tmp_path / "ours" / "service.key_secret", tmp_path / "ours" / "clients")
    public = tmp_path / "ours" / "service.key"
    with tcp_service(service) as address:
        answers = []
        for owner, patience_s in (("ours", PATIENCE_S), ("theirs", 1.0)):
            keys = ClientKeys(tmp_path / owner / "client.key_secret", public)
            with contextlib.closing(DraftClient(ClientOptions(address, keys=keys))) as client:
                answers.append(client.hello(patience_s))

    assert answers[0] is not None
    assert answers[1] is None


def test_tcp_without_keys_is_refused_on_both_sides(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(AddressError, match="TCP needs CURVE keys"):
        Server(ScriptedEngine(DRAFT), ServiceOptions(address)).serve()
    with pytest.raises(AddressError, match="TCP needs CURVE keys"):
        DraftClient(ClientOptions(address))


def test_keys_that_cannot_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    make_keys(tmp_path)
    address = f"tcp://127.0.0.1:{free_port()}"
    empty = tmp_path / "nobody"
    empty.mkdir()
    cases = {
        "cannot be read as a key": ServiceKeys(tmp_path / "absent", tmp_path / "clients"),
        "holds no secret key": ServiceKeys(tmp_path / "service.key", tmp_path / "clients"),
        "holds no client's public key": ServiceKeys(tmp_path / "service.key_secret", empty),
    }
    for message, keys in cases.items():
        with pytest.raises(AddressError, match=message):
            Server(ScriptedEngine(DRAFT), ServiceOptions(address, keys)).serve()


def test_an_address_in_use_or_of_no_kind_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with scripted_service(tmp_path) as service:
        with pytest.raises(AddressError, match=r"listens at .* already"):
            Server(ScriptedEngine(DRAFT), ServiceOptions(service.address)).serve()
        service.wait_until_up()  # for new clients as well: its socket is still there
    with pytest.raises(AddressError, match="is no socket"):
        Server(ScriptedEngine(DRAFT), ServiceOptions(f"ipc://{taken}")).serve()
    assert taken.exists()
    with pytest.raises(AddressError, match="is no address"):
        DraftClient(ClientOptions("carrier pigeon"))


def test_the_default_address_is_a_unix_socket() -> None:
    assert default_address().startswith("ipc:///")


def test_keys_are_written_for_their_owner_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keys", str(tmp_path / "keys")])

    assert result.exit_code == 0
    for name in ("service.key_secret", "client.key_secret"):
        assert (tmp_path / "keys" / name).stat().st_mode & 0o777 == 0o600


KEYS = ("service.key", "service.key_secret", "client.key", "client.key_secret", "clients/client.key")


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_keys_that_exist_are_never_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    assert CliRunner().invoke(app, ["keys", str(directory)]).exit_code == 0
    before = files_of(directory)
    result = CliRunner().invoke(app, ["keys", str(directory)])

    assert result.exit_code == 2
    assert f"{directory}/service.key exists already, so nothing was written" in result.stderr
    assert "name another directory, or first delete the keys in this one yourself" in result.stderr
    assert files_of(directory) == before and set(before) == set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_one_key_that_exists_is_enough_to_write_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / name).write_text("mine")

    with pytest.raises(AddressError, match=rf"{name} exists already"):
        make_keys(tmp_path)
    assert files_of(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_appears_meanwhile_is_left_alone_and_no_half_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two commands at once: the other one has written this file since we looked."""
    (tmp_path / "clients").mkdir()
    create = zmq.auth.create_certificates

    def create_late(*arguments: Any) -> Any:
        (tmp_path / name).write_text("theirs")
        return create(*arguments)

    monkeypatch.setattr(zmq.auth, "create_certificates", create_late)

    with pytest.raises(AddressError, match=rf"{name} exists already"):
        make_keys(tmp_path)
    assert files_of(tmp_path) == {name: b"theirs"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.gguf"], "no model 'nowhere.gguf' on this machine"),
        (["x", "--log-format", "xml"], "'xml' is not one of 'text', 'json'"),
        (["x", "--cores", "one"], "whole numbers"),
        (["x", "--engine", "abacus"], "no engine is called"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(arguments: list[str], message: str) -> None:
    if "nowhere.gguf" in arguments:
        pytest.importorskip("llama_cpp")
    result = CliRunner().invoke(app, ["draft", *arguments])

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_over_tcp_a_namespace_belongs_to_the_key_of_its_client(tmp_path: Path) -> None:
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    public = (tmp_path / "theirs" / "client.key").read_bytes()
    (tmp_path / "ours" / "clients" / "theirs.key").write_bytes(public)
    service = ServiceKeys(tmp_path / "ours" / "service.key_secret", tmp_path / "ours" / "clients")
    sessions = {}
    with tcp_service(service) as address:
        for owner in ("ours", "theirs"):
            keys = ClientKeys(tmp_path / owner / "client.key_secret", tmp_path / "ours" / "service.key")
            options = ClientOptions(address, "pearl", {"gamma": 4}, keys=keys, namespace=b"prod", deadline_s=0.2)
            with (
                contextlib.closing(DraftClient(options)) as client,
                contextlib.closing(StatsClient(address, b"prod", keys)) as stats_client,
            ):
                if owner == "ours":
                    walk_until_accepted(Walk(client, [1, 2]))
                ask_until(stats_client, ServiceStatus.ANSWERS)
                assert stats_client.stats is not None
                sessions[owner] = stats_client.stats.sessions

    assert sessions == {"ours": 1, "theirs": 0}


def key_owners(directory: Path, *names: str) -> ServiceKeys:
    """Keys of clients with these names, and those of the service of the first one."""
    for name in names:
        make_keys(directory / name)
    return ServiceKeys(directory / names[0] / "service.key_secret", directory / names[0] / "clients")


def options_of(directory: Path, owner: str, address: str, service: str = "ours") -> ClientOptions:
    keys = ClientKeys(directory / owner / "client.key_secret", directory / service / "service.key")
    return ClientOptions(address, "pearl", {"gamma": 4}, keys=keys, deadline_s=0.2)


def is_served(options: ClientOptions, patience_s: float) -> bool:
    with contextlib.closing(DraftClient(options)) as client:
        return client.hello(patience_s) is not None


def test_a_key_that_is_added_is_served_without_a_restart(tmp_path: Path) -> None:
    service = key_owners(tmp_path, "ours", "theirs")
    with tcp_service(service) as address:
        options = options_of(tmp_path, "theirs", address)
        assert not is_served(options, 0.5)
        shutil.copy(tmp_path / "theirs" / "client.key", service.clients / "theirs.key")

        wait_for(lambda: is_served(options, 0.5))


def test_a_key_that_is_removed_cuts_its_connections_and_no_others(tmp_path: Path) -> None:
    service = key_owners(tmp_path, "ours", "theirs")
    shutil.copy(tmp_path / "theirs" / "client.key", service.clients / "theirs.key")
    with (
        tcp_service(service) as address,
        contextlib.closing(DraftClient(options_of(tmp_path, "ours", address))) as kept,
        contextlib.closing(DraftClient(options_of(tmp_path, "theirs", address))) as revoked,
    ):
        walks = [Walk(kept, [1, 2]), Walk(revoked, [3, 4])]
        for walk in walks:
            walk_until_accepted(walk)
        before = kept.counts.unreachable, revoked.counts.unreachable
        (service.clients / "theirs.key").unlink()
        walks[1].step_until(lambda: revoked.counts.unreachable > before[1])
        num_accepted = walks[1].num_accepted
        walk_until_accepted(walks[0])
        for _ in range(20):
            walks[1].step()

        assert walks[1].num_accepted == num_accepted
        assert not is_served(options_of(tmp_path, "theirs", address), 0.5)
        assert kept.counts.unreachable == before[0]
        assert kept.counts.refused == kept.counts.faults == revoked.counts.faults == 0
        for walk in walks:
            walk.assert_text_is_the_targets()


def test_a_target_goes_on_with_its_new_key_when_the_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.service.client.transport._RENEWAL_S", 0.2)
    service = key_owners(tmp_path, "ours", "new")
    with (
        tcp_service(service) as address,
        contextlib.closing(DraftClient(options_of(tmp_path, "ours", address))) as client,
    ):
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)
        shutil.copy(tmp_path / "new" / "client.key", service.clients / "new.key")
        wait_for(lambda: is_served(options_of(tmp_path, "new", address), 0.5))
        shutil.copy(tmp_path / "new" / "client.key_secret", tmp_path / "ours" / "client.key_secret")
        walk_until_accepted(walk)
        before = client.counts.unreachable
        (service.clients / "new.key").replace(service.clients / "client.key")
        walk.step_until(lambda: client.counts.unreachable > before)
        walk_until_accepted(walk)

        assert client.counts.faults == client.counts.refused == 0
        walk.assert_text_is_the_targets()
        assert service.owner() == zmq.auth.load_certificate(tmp_path / "new" / "client.key")[0]


def test_a_hangup_signal_asks_the_service_to_read_its_keys(tmp_path: Path) -> None:
    num_asked = 0

    class Asked(Server):
        def reload_keys(self) -> None:
            nonlocal num_asked
            num_asked += 1

    before = signal.getsignal(signal.SIGHUP)
    try:
        reload_keys_on_hangup(Asked(ScriptedEngine(DRAFT), ServiceOptions(f"ipc://{tmp_path}/draft.sock")))
        signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert num_asked == 1


def test_keys_are_read_at_once_when_the_service_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.service.server.server._CHECK_S", 1e9)
    service = key_owners(tmp_path, "ours", "theirs")
    address = f"tcp://127.0.0.1:{free_port()}"
    server = Server(ScriptedEngine(DRAFT), ServiceOptions(address, service))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        options = options_of(tmp_path, "theirs", address)
        assert is_served(options_of(tmp_path, "ours", address), PATIENCE_S)
        shutil.copy(tmp_path / "theirs" / "client.key", service.clients / "theirs.key")
        assert not is_served(options, 2.0)
        server.reload_keys()

        wait_for(lambda: is_served(options, 0.5))
    finally:
        server.stop()
        thread.join(PATIENCE_S)


def test_keys_that_cannot_be_read_now_stay_as_they_were(tmp_path: Path) -> None:
    """A file may be half written, and a directory may be exchanged."""
    service = key_owners(tmp_path, "ours", "theirs")
    keyring = ClientKeyring(service.clients)
    (ours,) = keyring.keys
    (service.clients / "half.key").write_text("metadata\n")
    (service.clients / "client.key").write_text("metadata\n")
    keyring.refresh()
    assert keyring.keys == {ours}
    shutil.copy(tmp_path / "theirs" / "client.key", service.clients / "half.key")
    keyring.refresh()
    assert len(keyring.keys) == 2 and ours in keyring.keys
    service.clients.rename(tmp_path / "away")
    keyring.refresh()
    assert len(keyring.keys) == 2
    service.clients.mkdir()
    keyring.refresh()

    assert keyring.keys == frozenset() and not keyring.callback("", ours)
