"""A draft service that this process starts and restarts, or one that runs already and refuses keys that do not fit."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.options import remote_draft
from specbranch.cli.preflight import Preflight
from specbranch.draft_server import DraftServer
from specbranch.engines.vocabulary import VocabularyError
from specbranch.errors import UsageError
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions, RemoteDraft, StartError, _fetch_welcome
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.service.client.client import DraftClient
from specbranch.service.wire.addresses import AddressError, ServiceKeys, make_keys
from tests.root import ROOT
from tests.service.harness import PATIENCE_S, be_patient, free_port, scripted_service, tcp_service


def keys_in(directory: Path) -> ServiceKeys:
    make_keys(directory)
    return ServiceKeys(directory / "service.key_secret", directory / "clients")


def test_a_service_that_runs_says_what_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_service(tmp_path) as service, monkeypatch.context() as patch:
        be_patient(patch)
        (welcome,) = RemoteDraft((service.address,)).check()

    assert welcome.model
    _fetch_welcome.cache_clear()
    assert RemoteDraft((service.address,)).check() == []  # it has ended: no reason not to start the target


def test_a_proxy_without_a_service_behind_it_is_no_reason_not_to_start(tmp_path: Path) -> None:
    make_keys(tmp_path / "ours")
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        address = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"

        assert RemoteDraft((address,), tmp_path / "ours").check() == []


def test_the_right_keys_are_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    with tcp_service(keys_in(tmp_path / "ours")) as address:
        remote = RemoteDraft((address,), tmp_path / "ours")

        assert len(remote.check()) == 1
    assert remote.section == {"address": address, "keys": str(tmp_path / "ours")}


def test_several_services_are_asked_and_all_are_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is not there, and is given up at once."""
    be_patient(monkeypatch)
    keys = keys_in(tmp_path / "ours")
    absent = f"tcp://127.0.0.1:{free_port()}"
    hello = DraftClient.hello
    monkeypatch.setattr(
        DraftClient,
        "hello",
        lambda client, timeout_s: None if client._options.address == absent else hello(client, timeout_s),
    )
    with tcp_service(keys) as one, tcp_service(keys) as two:
        remote = remote_draft([one, absent, two, one], tmp_path / "ours")

        assert remote is not None
        assert len(remote.check()) == 2
    assert remote.section == {"address": [one, absent, two], "keys": str(tmp_path / "ours")}
    settings = ProposerSettings(**remote.section)
    assert settings.client_options(4).address == [one, absent, two]
    assert DraftServer.at((one, two), tmp_path / "ours").vllm_args()["additional_config"]["specbranch"]["address"] == [
        one,
        two,
    ]


@pytest.mark.parametrize("wrong", ["client.key_secret", "service.key"])
def test_keys_that_do_not_fit_are_refused(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is there: it greets, and then does not answer."""
    monkeypatch.setattr("specbranch.launch.draft_process._CONNECT_S", PATIENCE_S)
    make_keys(tmp_path / "theirs")
    with tcp_service(keys_in(tmp_path / "ours")) as address:
        shutil.copytree(tmp_path / "ours", tmp_path / "mixed")
        shutil.copy(tmp_path / "theirs" / wrong, tmp_path / "mixed" / wrong)
        with pytest.raises(UsageError, match=r"does not answer this client.*or it does not know these keys"):
            RemoteDraft((address,), tmp_path / "mixed").check()


def test_keys_that_are_not_there_and_addresses_of_no_kind_are_refused(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(AddressError, match="TCP needs CURVE keys"):
        RemoteDraft((address,)).check()
    with pytest.raises(AddressError, match="cannot be read as a key"):
        RemoteDraft((address,), tmp_path).check()
    with pytest.raises(AddressError, match="is no address"):
        RemoteDraft(("somewhere",)).check()


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_the_commands_refuse_keys_that_do_not_fit(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    monkeypatch.setattr("specbranch.cli.preflight.known_arguments", lambda: None)
    monkeypatch.setattr("specbranch.launch.draft_process._CONNECT_S", PATIENCE_S)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text("{}")
    make_keys(tmp_path / "theirs")
    words = [command, str(tmp_path / "big"), "--draft-keys", str(tmp_path / "theirs")]
    words += ["--prompt", "x"] if command == "generate" else ["--port", str(free_port())]
    with tcp_service(keys_in(tmp_path / "ours")) as address:
        done = CliRunner().invoke(app, [*words, "--draft-address", address])

    assert done.exit_code == 2
    assert "or it does not know these keys" in done.stderr


def test_a_running_draft_with_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text('{"vocab_size": 151936}')
    with scripted_service(tmp_path) as service:
        preflight = Preflight(target=str(tmp_path / "big"), remote=RemoteDraft((service.address,)))
        with pytest.raises(VocabularyError, match="cannot draft for"):
            preflight.run()
        (tmp_path / "big" / "config.json").write_text('{"vocab_size": 50}')
        preflight.run()


@pytest.fixture
def scripted_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftServiceOptions:
    """Let `specbranch draft` start a service with a scripted engine."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.service.scripted_service --listen "$8"\n')
    program.chmod(0o755)
    monkeypatch.setattr("specbranch.launch.draft_process.sys.executable", str(program))
    monkeypatch.setattr("specbranch.launch.draft_process._FIRST_PAUSE_S", 0.01)
    return DraftServiceOptions("d")


def test_a_supervised_service_is_restarted_at_its_address_until_it_is_stopped(
    scripted_draft: DraftServiceOptions,
) -> None:
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    with DraftProcess(scripted_draft, on_event=events.put) as draft:
        first, address = draft.pid, draft.address
        os.kill(first, signal.SIGKILL)
        assert events.get(timeout=PATIENCE_S) == "the draft service was ended by SIGKILL; restarting it in 0.01 s"
        assert events.get(timeout=PATIENCE_S) == "the draft service is back"
        assert draft.pid != first and draft.address == address and draft.is_running

    assert events.empty()
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_a_service_that_is_not_supervised_stays_ended(scripted_draft: DraftServiceOptions) -> None:
    with DraftProcess(scripted_draft) as draft:
        assert draft.welcome is not None
        os.kill(draft.pid, signal.SIGKILL)
        time.sleep(0.5)  # a supervisor looks every 0.2 s

        assert not draft.is_running


def test_a_service_that_ends_while_it_starts_is_named_with_its_last_error(
    scripted_draft: DraftServiceOptions, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho 'error: the model is missing' >&2\nexit 3\n")

    with pytest.raises(StartError, match="the draft service for d ended with code 3: the model is missing"):
        DraftProcess(scripted_draft, tmp_path / "draft.log").__enter__()
