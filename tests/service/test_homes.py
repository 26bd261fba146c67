"""Which service has which text: by content, for as long as it can be, and evenly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specbranch.service.client import pool
from specbranch.service.client.pool import KEY_LEN, RendezvousRouter

ADDRESSES = ["ipc:///one", "ipc:///two", "ipc:///three"]
ALL = [0, 1, 2]


def homes(namespace: bytes = b"ours") -> RendezvousRouter:
    return RendezvousRouter(ADDRESSES, namespace)


def prompt(number: int) -> list[int]:
    return [number, 7, 8]


def test_equal_beginnings_meet_at_one_service_whoever_asks() -> None:
    """Targets may name the services in another order, and may hand over arrays."""
    ours, theirs = homes(), RendezvousRouter(ADDRESSES[::-1], b"ours")
    long = list(range(KEY_LEN))
    for text in (*map(prompt, range(50)), long):
        chosen = ours.assign(text, ALL)
        assert chosen is not None
        assert theirs.assign(np.array(text), ALL) == 2 - chosen
    assert len({homes().assign([*long, number], ALL) for number in range(50)}) == 1


def test_another_namespace_shares_nothing_and_so_is_spread_on_its_own() -> None:
    places = [(homes().assign(prompt(n), ALL), homes(b"theirs").assign(prompt(n), ALL)) for n in range(300)]

    assert min(Counter(places).values()) > 15 and len(Counter(places)) == 9


def test_texts_are_spread_evenly() -> None:
    found = Counter(homes().assign(prompt(number), ALL) for number in range(3000))

    # The standard deviation of each is 26.
    assert all(900 < found[service] < 1100 for service in ALL)


def test_only_the_texts_of_a_service_that_fails_move_and_they_move_apart() -> None:
    before = {number: homes().assign(prompt(number), ALL) for number in range(600)}
    after = {number: homes().assign(prompt(number), [0, 2]) for number in range(600)}

    assert all(after[number] == home for number, home in before.items() if home != 1)
    moved = Counter(after[number] for number, home in before.items() if home == 1)
    assert min(moved[0], moved[2]) > 60
    assert homes().assign(prompt(1), []) is None


def test_where_all_texts_begin_alike_no_service_gets_much_more_than_its_share() -> None:
    ours = homes()
    for number in range(48):
        chosen = ours.assign([1] * KEY_LEN, ALL)
        assert chosen is not None
        ours.pin(bytes([number]), chosen)
        if number < 4:
            assert chosen == homes().assign([1] * KEY_LEN, ALL), "a few may stay together"
    loads = Counter(ours.lookup(bytes([number])) for number in range(48))

    assert sorted(loads.values()) == [8, 20, 20]
    ours.reset_loads()
    assert ours.assign([1] * KEY_LEN, ALL) == homes().assign([1] * KEY_LEN, ALL)


def test_a_text_is_found_by_the_name_that_it_has_now() -> None:
    ours = homes()
    ours.pin(b"before", 2)
    ours.pin(b"after", 2)
    ours.forget([b"before", b"unknown"])

    assert ours.lookup(b"after") == 2 and ours.lookup(b"before") is None


def test_texts_that_have_ended_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MOST", 2)
    ours = homes()
    for name in (b"a", b"b", b"a", b"c"):
        ours.pin(name, 1)

    assert [ours.lookup(name) for name in (b"a", b"b", b"c")] == [1, None, 1]
