"""Known services and the ones that a client uses: names, files, the selection, and real processes that come and go."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.launch.draft_process import RemoteDraft
from specbranch.plugins.vllm.settings import read_settings
from specbranch.service.client import discovery, pool
from specbranch.service.client.discovery import (
    AddressWatch,
    DnsSource,
    FileSource,
    Health,
    SelectionChange,
    ServiceSelection,
    check_addresses,
    rendezvous_order,
    selection_key,
)
from specbranch.service.client.interface import ClientOptions, SequenceUpdate, client_keys
from specbranch.service.client.pool import DraftPool, draft_client
from specbranch.service.client.transport import ZmqTransport, poll_any
from specbranch.service.wire.addresses import AddressError, ClientKeys, ServiceKeys, make_keys
from tests.root import ROOT
from tests.service.client.test_pool import NAMESPACE, drain, serving, sockets, texts_at
from tests.service.harness import PATIENCE_S, START_S, Walk, free_port, scripted_service, wait_for
from tests.service.test_faults import walk_until_accepted

ME = b"client"
SERVICES = [f"ipc:///services/{number}" for number in range(10)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ClientKeys:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory)
    found = client_keys(str(directory))
    assert found is not None
    return found


class Names:
    """A resolver that says what it is told to say, and counts its questions."""

    def __init__(self) -> None:
        self.hosts: list[str] | None = None
        self.num_asked = 0

    def __call__(self, name: str, port: int) -> list[str]:
        self.num_asked += 1
        if self.hosts is None:
            raise socket.gaierror(-2, "Name or service not known")
        return self.hosts


def named(keys: ClientKeys, monkeypatch: pytest.MonkeyPatch) -> tuple[AddressWatch, Names]:
    names = Names()
    monkeypatch.setattr(discovery, "resolve_name", names)
    return AddressWatch(["dns://drafts.local:5757"], ME, keys), names


def refresh(watch: AddressWatch) -> set[str]:
    for source in watch.sources:
        watch.refresh(source)
    return set(watch.known)


def rewrite(path: Path, *lines: str) -> None:
    """Replace a file as a whole, as `mv` does."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines))
    fresh.replace(path)


def test_every_record_of_a_name_is_a_service(keys: ClientKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, names = named(keys, monkeypatch)
    assert watch.known == ()
    names.hosts = ["10.0.0.2", "fd00::7", "10.0.0.1", "10.0.0.2"]

    assert refresh(watch) == {"tcp://10.0.0.1:5757", "tcp://10.0.0.2:5757", "tcp://[fd00::7]:5757"}


def test_a_name_that_fails_keeps_its_last_services_and_is_logged_once(
    keys: ClientKeys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, names = named(keys, monkeypatch)
    (source,) = watch.sources
    assert watch.refresh(source) < source.interval_s, "at first it is tried again soon"
    names.hosts = ["10.0.0.1"]
    assert watch.refresh(source) == source.interval_s == 30.0
    known = watch.known
    with caplog.at_level(logging.INFO):
        for names.hosts in (None, None, [], ["10.0.0.1"]):
            watch.refresh(source)
            assert watch.known is known

    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["vLLM runs without these draft services" in record.message for record in warned] == [True, False]
    assert "dns://drafts.local:5757 names draft services again" in caplog.text


def test_localhost_resolves(keys: ClientKeys) -> None:
    assert "tcp://127.0.0.1:5757" in DnsSource("dns://localhost:5757", keys).read()


def test_a_file_is_read_again_when_it_was_replaced_and_kept_while_it_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "services"
    watch = AddressWatch([f"file://{path}", SERVICES[9]], ME)
    assert refresh(watch) == {SERVICES[9]}, "it does not exist yet"
    rewrite(path, "# ours", SERVICES[0], "", f"  {SERVICES[1]}  ", SERVICES[0])
    assert refresh(watch) == {*SERVICES[:2], SERVICES[9]}
    caplog.clear()
    for broken in ([], ["somewhere"], ["tcp://10.0.0.1:5757"], ["tcp://10.0.0.1"], ["dns://drafts:5757"], ["\0"]):
        rewrite(path, SERVICES[5], *broken) if broken else rewrite(path)
        assert refresh(watch) == {*SERVICES[:2], SERVICES[9]}
    path.unlink()
    assert refresh(watch) == {*SERVICES[:2], SERVICES[9]}
    assert len(caplog.records) == 1
    rewrite(path, SERVICES[2])
    assert refresh(watch) == {SERVICES[2], SERVICES[9]}


def test_a_file_that_has_not_changed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "services"
    rewrite(path, SERVICES[0])
    source = FileSource(f"file://{path}", None)
    assert source.read() == (SERVICES[0],)
    monkeypatch.setattr(Path, "read_text", lambda _: pytest.fail("the file was read"))

    assert source.read() is None


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would hold up the thread for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AddressError, match="is no file"):
        FileSource(f"file://{tmp_path}/pipe", None).read()


def test_wrong_addresses_are_refused_with_a_way_out(keys: ClientKeys) -> None:
    for address, message in (
        ("http://drafts:5757", r"is no address; give ipc://PATH, file:///PATH, or with keys .*dns://NAME:PORT"),
        ("dns://drafts", "no name and port; give dns://NAME:PORT"),
        ("dns://drafts:many", "no name and port"),
        ("dns://:5757", "no name and port"),
        ("file://services", "give file:///PATH"),
    ):
        with pytest.raises(AddressError, match=message):
            check_addresses([address], keys)
        with pytest.raises(AddressError, match=message):
            draft_client(ClientOptions(["ipc:///nowhere/draft.sock", address], keys=keys))
    with pytest.raises(AddressError, match="TCP needs CURVE keys"):
        check_addresses(["dns://drafts:5757"], None)
    with pytest.raises(AddressError, match="is no DNS name"):
        DnsSource(f"dns://{'a' * 64}.b:5757", keys).read()


def test_the_setting_takes_names_and_files_and_a_number_of_services() -> None:
    settings = read_settings({"address": ["dns://drafts:5757", "file:///etc/drafts"], "max_services": 3})
    assert settings.client_options(4).max_services == 3
    assert read_settings({}).max_services == 4
    for wrong in (0, 65, "4"):
        with pytest.raises(ValueError, match="max_services"):
            read_settings({"max_services": wrong})


def test_a_name_without_services_does_not_stop_a_start(
    keys: ClientKeys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "resolve_name", Names())

    assert RemoteDraft(("dns://drafts.local:5757",), keys.secret.parent).check() == []
    assert "dns://drafts.local:5757 cannot be used" in caplog.text


def test_a_name_that_takes_long_holds_up_neither_calls_nor_files(
    tmp_path: Path, keys: ClientKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, asked = threading.Event(), threading.Event()

    def resolve(name: str, port: int) -> list[str]:
        asked.set()
        released.wait(PATIENCE_S)
        return ["127.0.0.1"]

    monkeypatch.setattr(discovery, "resolve_name", resolve)
    (address,) = sockets(tmp_path, "one")
    rewrite(tmp_path / "services", address)
    listed = [f"file://{tmp_path}/services", "dns://slow:5757"]
    options = ClientOptions(listed, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S, keys=keys)
    with serving([address]), contextlib.closing(DraftPool(options)) as drafts:
        walk = Walk(drafts, [1, 2, 3])
        assert asked.wait(PATIENCE_S)
        walk_until_accepted(walk)
        assert not released.is_set() and drafts.addresses == (address,)
        drafts.close()
        released.set()
    walk.assert_text_is_the_targets()


@given(st.sets(st.integers(0, 200), min_size=1), st.binary(min_size=1, max_size=16), st.data())
def test_the_order_of_the_others_stays_when_a_service_leaves(
    numbers: set[int], identity: bytes, data: st.DataObject
) -> None:
    services = [f"tcp://10.0.0.{number}:5757" for number in sorted(numbers)]
    gone = data.draw(st.sampled_from(services))
    order = rendezvous_order(services, selection_key(identity))
    without = rendezvous_order([one for one in services if one != gone], selection_key(identity))

    assert sorted(order) == sorted(services)
    assert without == [one for one in order if one != gone]


class Bench:
    """A selection, and what it is connected to: attempts end when they are told to."""

    def __init__(self, num_services: int, max_services: int = 4) -> None:
        self.selection = ServiceSelection(max_services)
        self.services = SERVICES[:num_services]
        self.selection.set_known(self.services)
        self.health: dict[str, Health] = {}
        self.idle: set[str] = set()
        self.now_s = 0.0

    def update(self, dead: Sequence[int] = ()) -> SelectionChange:
        """Take one look, and let all attempts end at once."""
        change = self.selection.update(self.health, self.idle, self.now_s)
        for address in change.close:
            del self.health[address]
        for address in change.connect:
            is_up = SERVICES.index(address) not in dead
            self.selection.finish_attempt(address, is_up, self.now_s)
            if is_up:
                self.health[address] = Health.UP
        return change

    def settle(self, dead: Sequence[int] = ()) -> list[int]:
        """Look until nothing changes, and return the numbers of the connected services."""
        while self.update(dead) != SelectionChange():
            pass
        return self.connected()

    def connected(self) -> list[int]:
        return sorted(map(SERVICES.index, self.health))


def test_a_client_connects_to_the_first_services_of_its_order() -> None:
    assert Bench(10).settle() == [0, 1, 2, 3]
    assert Bench(10, max_services=3).settle() == [0, 1, 2]
    assert Bench(2).settle() == [0, 1]
    assert Bench(10).settle(dead=[1, 2, 4]) == [0, 3, 5, 6]


def test_the_next_service_takes_the_place_of_one_that_fails_and_gives_it_back() -> None:
    bench = Bench(10)
    bench.settle()
    bench.health[SERVICES[1]] = Health.DOWN
    assert bench.settle(dead=[1]) == [0, 2, 3, 4]
    bench.now_s = 10.0
    assert bench.update(dead=[1]).connect == (SERVICES[1],), "it is tried again, and the others stay meanwhile"
    assert bench.connected() == [0, 2, 3, 4]
    bench.now_s = 29.0
    assert bench.update(dead=[1]) == SelectionChange(), "the second pause is longer"
    bench.now_s = 31.0
    assert bench.settle() == [0, 1, 2, 3, 4]
    assert bench.selection.retiring == {SERVICES[4]}, "it finishes its sequences"
    bench.idle = {SERVICES[4], SERVICES[0]}
    assert bench.settle() == [0, 1, 2, 3]


def test_a_draining_service_finishes_its_sequences_while_the_next_takes_its_place() -> None:
    bench = Bench(10)
    bench.settle()
    bench.health[SERVICES[0]] = Health.DRAINING
    assert bench.settle() == [0, 1, 2, 3, 4] and not bench.selection.retiring
    bench.idle = {SERVICES[0]}
    assert bench.update().close == (SERVICES[0],)
    assert bench.settle() == [1, 2, 3, 4]


def test_no_connection_is_closed_while_there_are_places_for_all() -> None:
    bench = Bench(4)
    bench.settle()
    for health in (Health.DOWN, Health.DRAINING):
        bench.health = dict.fromkeys(SERVICES[:4], health)
        bench.idle = set(SERVICES)
        bench.now_s += 1000
        assert bench.update() == SelectionChange()


def test_services_that_leave_are_closed_and_new_ones_get_their_place_in_the_order() -> None:
    bench = Bench(10)
    bench.settle()
    bench.selection.set_known([SERVICES[8], *SERVICES[1:8]])
    change = bench.update()
    assert change.close == (SERVICES[0],) and change.connect == (SERVICES[8],)
    assert bench.settle() == [1, 2, 3, 8]


def test_a_client_whose_services_are_all_gone_walks_on_until_it_finds_others() -> None:
    bench = Bench(10)
    bench.settle()
    bench.health = dict.fromkeys(bench.health, Health.DOWN)

    assert bench.settle(dead=range(8)) == [0, 1, 2, 3, 8, 9], "none is closed before four others work"


@given(st.lists(st.sampled_from([*Health, None]), min_size=10, max_size=10), st.integers(1, 5), st.integers(0, 2**20))
def test_whatever_happens_a_client_has_few_connections_and_uses_the_first_that_work(
    states: list[Health | None], max_services: int, seed: int
) -> None:
    bench = Bench(10, max_services)
    dead = [number for number, state in enumerate(states) if state in (None, Health.DOWN)]
    bench.health = {SERVICES[number]: state for number, state in enumerate(states) if state and seed >> number & 1}
    bench.settle(dead)
    num_others = sum(health is not Health.UP for health in bench.health.values())

    assert len(bench.health) - num_others <= 2 * max_services
    working = [number for number in range(10) if number not in dead and states[number] is not Health.DRAINING]
    used = [number for number in bench.connected() if bench.health[SERVICES[number]] is Health.UP]
    fresh = [number for number in used if SERVICES[number] not in bench.selection.retiring]
    assert set(working[:max_services]) <= {*fresh, *dead} or len(fresh) == max_services


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("fleet")
    sys.path.remove(str(ROOT / "benchmarks"))
    del sys.modules["fleet"]


def test_where_a_quarter_of_the_services_leaves_only_their_clients_move(fleet: Any) -> None:
    for is_named in (True, False):
        found = fleet.leave(4, is_named, num_clients=100, num_services=25, num_leaving=6)

        assert found["without_service_after"] == found["moved_without_need"] == 0
        assert found["after"]["services_of_a_client"] == [4, 4] and found["after"]["connections"] == 400
        assert found["most_connections_of_a_client"] <= 8
        assert found["back_as_before"] == 1.0


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at files often, and close services that are idle soon."""
    monkeypatch.setattr(FileSource, "interval_s", 0.02)
    monkeypatch.setattr(pool, "_IDLE_S", 0.2)
    monkeypatch.setattr(pool, "_REPLACED_S", 0.1)
    monkeypatch.setattr(pool, "_CHECK_S", 0.0)


def pool_of_file(path: Path, **changes: Any) -> contextlib.closing[DraftPool]:
    chosen = {"deadline_s": PATIENCE_S, "namespace": NAMESPACE, **changes}
    return contextlib.closing(DraftPool(ClientOptions(f"file://{path}", "pearl", {"gamma": 4}, **chosen)))


def wait_for_services(drafts: DraftPool, wanted: Iterable[str]) -> None:
    def is_so() -> bool:
        drafts.propose([])
        return set(drafts.addresses) == set(wanted)

    wait_for(is_so, (drafts.addresses, wanted))


def test_a_client_of_many_services_connects_to_few_and_replaces_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    addresses = sockets(tmp_path, *"abcdef")
    order = rendezvous_order(addresses, selection_key(NAMESPACE))
    chosen = {"deadline_s": PATIENCE_S, "namespace": NAMESPACE}
    options = ClientOptions(addresses, "pearl", {"gamma": 4}, max_services=2, **chosen)  # type: ignore[arg-type]
    with contextlib.ExitStack() as exits, contextlib.closing(DraftPool(options)) as drafts:
        (first,) = exits.enter_context(serving(order[:1]))
        with serving(order[1:2]) as (second,):
            (third,) = exits.enter_context(serving(order[2:3]))
            for service in drafts._services.values():
                assert service.client.hello(PATIENCE_S) is not None
            walks = [Walk(drafts, [number, 7, 5]) for number in range(8)]
            for walk in walks:
                walk_until_accepted(walk)
            assert set(drafts.addresses) == set(order[:2])
            assert len(texts_at(first)) + len(texts_at(second)) == 8 and not texts_at(third)
            num_there = len(texts_at(second))

        def is_replaced() -> bool:
            for walk in walks:
                walk.step()
            return set(drafts.addresses) == {order[0], order[2]}

        wait_for(is_replaced, drafts.addresses)
        for walk in walks:
            walk_until_accepted(walk)
            walk.assert_text_is_the_targets()

        assert len(texts_at(first)) + len(texts_at(third)) >= 8 and num_there
        assert drafts.counts.rerouted >= num_there and drafts.counts.faults == 0


def test_a_client_leaves_a_draining_service_when_its_texts_have_moved_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    addresses = sockets(tmp_path, *"abc")
    rewrite(tmp_path / "services", *addresses)
    order = rendezvous_order(addresses, selection_key(NAMESPACE))
    with serving(addresses), pool_of_file(tmp_path / "services", max_services=1) as drafts:
        walk = Walk(drafts, [1, 7, 5])
        walk_until_accepted(walk)
        assert drafts.addresses == (order[0],)
        assert drain(order[0])[0] == 0
        walk.step_until(lambda: set(drafts.addresses) == set(order[:2]))
        walk_until_accepted(Walk(drafts, [2, 7, 5]))
        walk.step_until(lambda: drafts.counts.rerouted == 1)
        wait_for_services(drafts, order[1:2])
        walk_until_accepted(walk)
        walk.assert_text_is_the_targets()


def test_a_service_that_is_not_used_costs_a_step_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = sockets(tmp_path, *"abcdefgh")
    order = rendezvous_order(addresses, selection_key(NAMESPACE))
    touched: list[str] = []
    for name in ("send", "receive"):
        original = getattr(ZmqTransport, name)

        def noted(self: ZmqTransport, argument: Any, original: Any = original) -> Any:
            touched.append(self._address)
            return original(self, argument)

        monkeypatch.setattr(ZmqTransport, name, noted)
    options = ClientOptions(addresses, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S, namespace=NAMESPACE)
    with serving(order[:4]), contextlib.closing(DraftPool(options)) as drafts:
        for service in drafts._services.values():
            assert service.client.hello(PATIENCE_S) is not None
        for number in range(20):
            drafts.propose([SequenceUpdate([number, 7, 5, 1], 1)])

    assert set(touched) == set(order[:4])


def test_a_service_that_does_not_answer_never_joins_and_no_call_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(pool, "_CONNECT_S", 0.1)
    one, silent = sockets(tmp_path, "one", "silent")
    rewrite(tmp_path / "services", one)
    waits: list[float] = []
    with serving([one]), pool_of_file(tmp_path / "services") as drafts:
        walk_until_accepted(Walk(drafts, [1, 7, 5]))
        monkeypatch.setattr(
            "specbranch.service.client.pool.poll_any",
            lambda links, timeout_s: waits.append(len(links)) or poll_any(links, timeout_s),  # type: ignore[func-returns-value]
        )
        rewrite(tmp_path / "services", one, silent)
        walk = Walk(drafts, [2, 7, 5])
        walk.step_until(lambda: silent in drafts._selection._failures)
        walk_until_accepted(walk)

        assert drafts.addresses == (one,) and set(waits) <= {1}
        assert drafts.counts.timeouts == drafts.counts.faults == 0


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))]
)
def test_keys_and_a_name_are_enough(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path)
    port = free_port()
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    monkeypatch.setattr(discovery, "resolve_name", lambda name, port: [host])
    options = ClientOptions(
        f"dns://drafts.local:{port}", "pearl", {"gamma": 4}, deadline_s=PATIENCE_S, keys=client_keys(str(tmp_path))
    )
    keys = ServiceKeys(tmp_path / "service.key_secret", tmp_path / "clients")
    with serving([address], keys), contextlib.closing(draft_client(options)) as drafts:
        walk = Walk(drafts, [1, 2, 3])
        walk_until_accepted(walk)
        assert drafts.addresses == (address,)


def test_a_pool_that_is_closed_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(pool, "_CONNECT_S", 0.1)
    rewrite(tmp_path / "services", *sockets(tmp_path, "one", "two"))
    with pool_of_file(tmp_path / "services") as drafts:
        wait_for(lambda: bool(drafts._watch.known))
        drafts.propose([])

    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("specbranch-")])


class Target(threading.Thread):
    """A client that decodes texts one after the other until it is told to stop."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(daemon=True)
        options = ClientOptions(f"file://{path}", "pearl", {"gamma": 4}, deadline_s=1.0, max_services=2)
        self.client = draft_client(options)
        self.walks: list[Walk] = []
        self.stopping = threading.Event()
        self.is_done = False
        self._number = number

    def run(self) -> None:
        while not self.stopping.is_set():
            walk = Walk(self.client, [self._number, len(self.walks) % 50, 7])
            self.walks.append(walk)
            for _ in range(30):
                walk.step()
                time.sleep(0.002)
        self.is_done = True

    @property
    def num_accepted(self) -> int:
        return sum(walk.num_accepted for walk in list(self.walks))


def test_eight_clients_follow_a_file_that_a_service_leaves_and_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are bounded by what they may wait for, not by how long this machine lets them take."""
    monkeypatch.setattr(FileSource, "interval_s", 0.05)
    waits: list[float] = []
    monkeypatch.setattr(
        "specbranch.service.client.pool.poll_any",
        lambda links, timeout_s: waits.append(timeout_s) or poll_any(links, timeout_s),  # type: ignore[func-returns-value]
    )
    path = tmp_path / "services"
    for name in "abc":
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as exits:
        leaving, staying = (exits.enter_context(scripted_service(tmp_path / name)) for name in "ab")
        rewrite(path, leaving.address, staying.address)
        targets = [Target(number, path) for number in range(8)]
        for target in targets:
            exits.callback(target.client.close)
            exits.callback(target.stopping.set)
            target.start()

        def progress(addresses: set[str]) -> None:
            wait_for(lambda: all(set(target.client.addresses) == addresses for target in targets), addresses)
            before = [target.num_accepted for target in targets]
            wait_for(lambda: all(target.num_accepted > num for target, num in zip(targets, before, strict=True)))

        progress({leaving.address, staying.address})
        coming = exits.enter_context(scripted_service(tmp_path / "c"))
        rewrite(path, staying.address, coming.address)
        progress({staying.address, coming.address})
        leaving.kill()
        progress({staying.address, coming.address})
        for target in targets:
            target.stopping.set()
        for target in targets:
            target.join(START_S)

    assert all(target.is_done for target in targets)
    assert max(waits) <= 1.0, "no call waits beyond its deadline"
    assert all(target.client.counts.faults == 0 for target in targets)
    for target in targets:
        for walk in target.walks:
            walk.assert_text_is_the_targets()
            assert len(walk.tokens) >= 3 + 31, "every text has gone on to its end"
