"""What every draft engine must do: the tests of `DraftEngine`, for our engines and those of other packages.

The reference is always the same: a fresh handle that is fed the whole sequence in one row.

To test an engine of your own, copy this file into your tests; it needs specbranch, pytest and hypothesis. Then write::

    ENGINE = MyEngine(EngineOptions("my-model", max_tokens=1024))

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def engine(self):
            return ENGINE

        @pytest.fixture
        def is_close(self):  # only if distributions are not equal to the last bit
            return lambda a, b: ...

    def test_random_histories():
        run_state_machine_as_test(machine_for(ENGINE, is_close), settings=STATEFUL)

The engine needs a vocabulary of at least 5 tokens, room for 13 handles and for about 1,000 tokens. One engine may serve
all tests: each test closes its handles. `closeness.py` compares distributions up to a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from specbranch.core.distribution import Distribution
from specbranch.engines.base import DraftEngine, Row
from specbranch.engines.vocabulary import HASH_LEN, MAX_SAMPLE

Close = Callable[[Distribution, Distribution], bool]


def fresh_distribution(engine: DraftEngine, tokens: Sequence[int]) -> Distribution:
    """The distribution behind a sequence, by a handle that has seen nothing else."""
    handle = engine.open()
    (distribution,) = engine.run([Row(handle, tuple(tokens))])
    engine.close(handle)
    return distribution


class EngineConformance:
    """Subclass it and give the fixture `engine`; `is_close` too, unless distributions are equal to the last bit."""

    @pytest.fixture
    def engine(self) -> DraftEngine:
        raise NotImplementedError

    @pytest.fixture
    def is_close(self) -> Close:
        return lambda a, b: a == b

    def test_it_says_what_it_is(self, engine: DraftEngine) -> None:
        info = engine.info

        assert info.model and info.device
        assert info.vocab_len > 4 and info.row_limit >= 1
        assert len(info.vocab_fingerprint) <= MAX_SAMPLE and len(info.vocab_fingerprint) % HASH_LEN == 0

    def test_a_distribution_is_a_top_k_with_falling_probabilities(self, engine: DraftEngine) -> None:
        distribution = fresh_distribution(engine, [1, 2, 3])

        assert len(distribution.ids) == len(distribution.probs) == len(set(distribution.ids))
        assert list(distribution.probs) == sorted(distribution.probs, reverse=True)
        assert 0 < sum(distribution.probs) <= 1 + 1e-6
        assert distribution.entropy >= 0

    def test_feeding_piece_by_piece_equals_feeding_at_once(self, engine: DraftEngine, is_close: Close) -> None:
        handle = engine.open()
        for piece in ((1, 2), (3,), (4, 1, 2)):
            (distribution,) = engine.run([Row(handle, piece)])
        engine.close(handle)

        assert is_close(distribution, fresh_distribution(engine, [1, 2, 3, 4, 1, 2]))

    def test_forks_go_their_own_ways_in_one_step(self, engine: DraftEngine, is_close: Close) -> None:
        trunk = engine.open()
        engine.run([Row(trunk, (1, 2, 3))])
        forks = [engine.fork(trunk, length) for length in (3, 2, 3)]
        distributions = engine.run([Row(trunk, (4,)), Row(forks[0], (1,)), Row(forks[1], (2,)), Row(forks[2], (3, 3))])
        for handle in (trunk, *forks):
            engine.close(handle)

        sequences = ([1, 2, 3, 4], [1, 2, 3, 1], [1, 2, 2], [1, 2, 3, 3, 3])
        assert all(
            is_close(distribution, fresh_distribution(engine, sequence))
            for distribution, sequence in zip(distributions, sequences, strict=True)
        )

    def test_a_fork_outlives_its_origin(self, engine: DraftEngine, is_close: Close) -> None:
        trunk = engine.open()
        engine.run([Row(trunk, (1, 2, 3))])
        fork = engine.fork(trunk, 3)
        engine.close(trunk)
        (distribution,) = engine.run([Row(fork, (4,))])
        engine.close(fork)

        assert is_close(distribution, fresh_distribution(engine, [1, 2, 3, 4]))

    def test_truncating_forgets_and_leaves_forks_alone(self, engine: DraftEngine, is_close: Close) -> None:
        trunk = engine.open()
        engine.run([Row(trunk, (1, 2, 3, 4))])
        fork = engine.fork(trunk, 4)
        engine.truncate(trunk, 1)
        distributions = engine.run([Row(trunk, (3,)), Row(fork, (1,))])
        engine.close(trunk)
        engine.close(fork)

        assert is_close(distributions[0], fresh_distribution(engine, [1, 3]))
        assert is_close(distributions[1], fresh_distribution(engine, [1, 2, 3, 4, 1]))

    def test_the_order_of_rows_does_not_matter(self, engine: DraftEngine, is_close: Close) -> None:
        handles = [engine.open() for _ in range(3)]
        sequences = [(1, 2), (3,), (2, 2, 4)]
        rows = [Row(handle, sequence) for handle, sequence in zip(handles, sequences, strict=True)]
        distributions = engine.run(rows[::-1])[::-1]
        for handle in handles:
            engine.close(handle)

        assert all(
            is_close(distribution, fresh_distribution(engine, sequence))
            for distribution, sequence in zip(distributions, sequences, strict=True)
        )

    def test_a_chain_in_one_step_equals_its_tokens_one_by_one(self, engine: DraftEngine, is_close: Close) -> None:
        trunk = engine.open()
        engine.run([Row(trunk, (1, 2))])
        forks = [engine.fork(trunk, 2), engine.fork(trunk, 1)]
        rows = [Row(trunk, (3, 4, 1), 3), Row(forks[0], (2,)), Row(forks[1], (4, 3, 3), 2)]
        distributions = engine.run(rows)
        (behind,) = engine.run([Row(trunk, (2,))])
        for handle in (trunk, *forks):
            engine.close(handle)

        sequences = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 1], [1, 2, 2], [1, 4, 3], [1, 4, 3, 3], [1, 2, 3, 4, 1, 2]]
        assert all(
            is_close(distribution, fresh_distribution(engine, sequence))
            for distribution, sequence in zip([*distributions, behind], sequences, strict=True)
        )

    def test_a_row_with_more_outputs_than_tokens_or_none_is_refused(self, engine: DraftEngine) -> None:
        handle = engine.open()
        for num_outputs in (0, 3):
            with pytest.raises(ValueError, match="one output"):
                engine.run([Row(handle, (1, 2), num_outputs)])
        engine.close(handle)

    def test_two_rows_for_one_handle_are_refused(self, engine: DraftEngine) -> None:
        handle = engine.open()
        with pytest.raises(ValueError, match="one row per handle"):
            engine.run([Row(handle, (1,)), Row(handle, (2,))])
        engine.close(handle)

    def test_a_row_without_tokens_is_refused(self, engine: DraftEngine) -> None:
        handle = engine.open()
        with pytest.raises(ValueError, match="at least one token"):
            engine.run([Row(handle, ())])
        engine.close(handle)

    def test_a_step_without_rows_does_nothing(self, engine: DraftEngine) -> None:
        before = engine.num_tokens

        assert engine.run([]) == []
        assert engine.num_tokens == before

    def test_a_handle_that_is_not_open_is_refused(self, engine: DraftEngine) -> None:
        handle = engine.open()
        engine.close(handle)

        with pytest.raises(KeyError):
            engine.run([Row(handle, (1,))])
        with pytest.raises(KeyError):
            engine.fork(handle, 0)
        with pytest.raises(KeyError):
            engine.truncate(handle, 0)
        with pytest.raises(KeyError):
            engine.close(handle)

    def test_forks_share_their_cells_and_closing_gives_them_back(self, engine: DraftEngine) -> None:
        before = engine.num_tokens
        trunk = engine.open()
        engine.run([Row(trunk, (1, 2, 3))])
        forks = [engine.fork(trunk, 3) for _ in range(3)]
        shared = engine.num_tokens - before
        engine.run([Row(fork, (token,)) for token, fork in enumerate(forks, start=1)])
        grown = engine.num_tokens - before
        for handle in (trunk, *forks):
            engine.close(handle)

        assert (shared, grown, engine.num_tokens) == (3, 6, before)

    def test_a_length_that_a_handle_does_not_hold_is_refused(self, engine: DraftEngine) -> None:
        handle = engine.open()
        engine.run([Row(handle, (1, 2))])
        with pytest.raises(ValueError, match="holds 2 tokens"):
            engine.fork(handle, 3)
        with pytest.raises(ValueError, match="holds 2 tokens"):
            engine.truncate(handle, -1)
        engine.close(handle)


def machine_for(engine: DraftEngine, is_close: Close, most_handles: int = 12) -> type[RuleBasedStateMachine]:
    """Random opens, runs, forks, truncations and closes: never a wrong distribution, and no cell left at the end."""

    class EngineMachine(RuleBasedStateMachine):
        handles = Bundle("handles")

        def __init__(self) -> None:
            super().__init__()
            self.sequences: dict[int, list[int]] = {}
            self.tokens_before = engine.num_tokens

        @initialize(target=handles)
        def begin(self) -> int:
            return self._hold(engine.open(), [])

        @rule(target=handles)
        def open(self) -> object:
            return self._hold(engine.open(), []) if len(self.sequences) < most_handles else multiple()

        @rule(target=handles, handle=handles, keep=st.integers(0, 6))
        def fork(self, handle: int, keep: int) -> object:
            if handle not in self.sequences or len(self.sequences) >= most_handles:
                return multiple()
            length = min(keep, len(self.sequences[handle]))
            return self._hold(engine.fork(handle, length), self.sequences[handle][:length])

        @rule(handle=handles, keep=st.integers(0, 6))
        def truncate(self, handle: int, keep: int) -> None:
            if handle in self.sequences:
                length = min(keep, len(self.sequences[handle]))
                engine.truncate(handle, length)
                del self.sequences[handle][length:]

        @rule(handle=handles)
        def close(self, handle: int) -> None:
            if handle in self.sequences:
                engine.close(handle)
                del self.sequences[handle]

        @rule(data=st.data())
        def run(self, data: st.DataObject) -> None:
            if not self.sequences:
                return
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), min_size=1, max_size=4, unique=True))
            pieces = [data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in chosen]
            distributions = engine.run([Row(h, tuple(piece)) for h, piece in zip(chosen, pieces, strict=True)])
            for handle, piece, distribution in zip(chosen, pieces, distributions, strict=True):
                self.sequences[handle] += piece
                assert is_close(distribution, fresh_distribution(engine, self.sequences[handle])), self.sequences[
                    handle
                ]

        @invariant()
        def cells_hold_no_more_than_the_texts(self) -> None:
            assert engine.num_tokens - self.tokens_before <= sum(len(sequence) for sequence in self.sequences.values())

        def teardown(self) -> None:
            for handle in self.sequences:
                engine.close(handle)
            assert engine.num_tokens == self.tokens_before

        def _hold(self, handle: int, sequence: Sequence[int]) -> int:
            self.sequences[handle] = list(sequence)
            return handle

    return EngineMachine


STATEFUL = settings(max_examples=200, stateful_step_count=30, deadline=None)
