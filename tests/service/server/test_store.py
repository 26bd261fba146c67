"""Texts that begin alike: found, borrowed, and never read in twice."""

from __future__ import annotations

from specbranch.service.server.store import MARK_LEN, PrefixIndex
from specbranch.service.wire.payloads import Digest
from tests.service.harness import DRAFT
from tests.service.server.test_lookup import Bench

LONG = list(range(40))


def test_the_longest_known_beginning_is_found() -> None:
    prefixes: PrefixIndex[str] = PrefixIndex()
    prefixes.add("short", b"n", LONG[:20])
    prefixes.add("long", b"n", LONG)

    assert prefixes.find(b"n", [*LONG, 1, 2, 3]) == ("long", 32)
    assert prefixes.find(b"n", [*LONG[:17], 49]) == ("long", 16)
    assert prefixes.find(b"n", [49, *LONG]) is None
    assert prefixes.find(b"other", LONG) is None
    assert prefixes.find(b"n", LONG[:MARK_LEN]) is None  # the last token must be run


def test_a_text_is_found_by_what_it_became_and_not_after_it_was_forgotten() -> None:
    prefixes: PrefixIndex[str] = PrefixIndex()
    prefixes.add("one", b"n", LONG[:10])
    assert prefixes.find(b"n", LONG) is None
    prefixes.add("one", b"n", LONG)
    prefixes.add("two", b"n", LONG[:20])
    assert prefixes.find(b"n", [*LONG[:20], 49]) == ("two", 16)
    assert prefixes.find(b"n", [*LONG, 49]) == ("one", 32)
    prefixes.remove("one")
    assert prefixes.find(b"n", [*LONG, 49]) == ("two", 16)
    prefixes.remove("two")
    assert prefixes.find(b"n", LONG) is None


def read_in(bench: Bench, text: list[int]) -> int:
    """Run until the text's distribution is known; how many tokens the cache grew by."""
    before = bench.engine.num_tokens
    session = bench.store.find((b"ours", Digest(text).name))
    assert session is not None
    while session.core.tree.root.distribution is None:
        assert bench.runner.run_step()
    return bench.engine.num_tokens - before


def test_another_text_with_the_same_beginning_borrows_it() -> None:
    bench = Bench(max_sessions=4)
    other = [*LONG[:35], 7, 8]
    bench.open(LONG)
    read_in(bench, LONG)
    bench.open(other)
    read_in(bench, other)
    session = bench.store.find((b"ours", Digest(other).name))
    assert session is not None

    assert bench.runner.counts.borrowed_tokens == 35
    distribution = session.core.tree.root.distribution
    assert distribution is not None and distribution.ids == DRAFT.distribution(tuple(other)).ids


def test_texts_opened_together_wait_for_the_first_to_be_read() -> None:
    bench = Bench(max_sessions=8)
    texts = [[*LONG[:33], end] for end in (1, 2, 3)]
    bench.open(*texts)
    for text in texts:
        read_in(bench, text)

    assert bench.runner.counts.borrowed_tokens == 2 * 33


def test_what_was_forgotten_cannot_be_borrowed() -> None:
    bench = Bench(max_sessions=4)
    bench.open(LONG)
    read_in(bench, LONG)
    other = [*LONG, 3]
    bench.open(other)
    bench.store.drop(bench.store.snapshot()[0])
    read_in(bench, other)

    assert bench.runner.counts.borrowed_tokens == 0
