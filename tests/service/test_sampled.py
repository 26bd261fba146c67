"""Draft tokens that are drawn by chance: what the service tells, what the client draws itself, what comes out."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling, SeededRandom
from specbranch.core.node import GreedyPicker
from specbranch.core.round import Draft
from specbranch.core.session import Session
from specbranch.service.client.client import DraftClient
from specbranch.service.client.filters import resample_draft
from specbranch.service.client.interface import ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.pool import DraftPool
from specbranch.service.client.sequences import SyncedSequences
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.wire.messages import (
    DraftReply,
    PrefetchPush,
    PrefetchRow,
    StepRequest,
    StepRow,
    VerdictDraft,
    WireSampling,
)
from specbranch.service.wire.payloads import Digest, pack_probs, unpack_probs
from specbranch.simulation.scripted import Candidates, ScriptedEngine, TextScript, reject
from tests.service.harness import PATIENCE_S
from tests.service.server.test_lookup import Bench
from tests.toys import planner_of, random_script

TEXT = [1, 2, 3]
VOCAB = 6
_BASE = random_script(3, VOCAB, sharpness=1)
TARGET = TextScript(VOCAB, lambda text: _BASE.distribution(text[-2:]))
_OTHER = random_script(4, VOCAB, like=_BASE, share=0.6, sharpness=1)
DRAFT = TextScript(VOCAB, lambda text: _OTHER.distribution(text[-2:]))


class SampledBench(Bench):
    """A service on a table, whose target samples."""

    def __init__(self, seed: int = 5, temperature: float = 1.0) -> None:
        super().__init__(ScriptedEngine(DRAFT), max_sessions=200)
        self.sampling = WireSampling(temperature, 1.0, 0, seed)
        self.open(TEXT, planner="budget", cost_aware=False, uses_text=False, uses_memory=False)
        self.work()

    def say(self, text: list[int], *new: int, taken: list[int] | None = None) -> tuple[list[int], bytes]:
        before = Digest(text)
        row = StepRow(before.name, list(new), before.extend(new).name, 0, None, taken, self.sampling)
        (reply,) = self.ask(StepRequest(1, b"ours", 0.0, [row])) or [DraftReply(1, [[]], [b""])]
        assert isinstance(reply, DraftReply) and reply.rows[0] is not None
        return reply.rows[0], reply.probs[0] if reply.probs else b""


def drafted(bench: SampledBench) -> tuple[list[int], list[int], bytes]:
    """A text after two rounds, by when tokens are drawn by chance; what is proposed behind it, and drawn from what."""
    bench.say(TEXT, 4)
    bench.work()
    text = [*TEXT, 4, 2]
    return text, *bench.say(text[:-1], 2)


def test_what_is_proposed_is_what_the_client_draws_from_what_it_is_told() -> None:
    num_drawn = 0
    for seed in range(1, 40):
        bench = SampledBench(seed)
        text, tokens, packed = drafted(bench)
        sampled_from = unpack_probs(packed, len(tokens))
        again, used = resample_draft(text, len(text), tokens, sampled_from, seed, None)

        assert again == tokens and used == sampled_from
        num_drawn += sum(one is not None for one in sampled_from)
    assert num_drawn > 40


def test_first_tokens_follow_the_distribution_that_is_told_with_them() -> None:
    counts: Counter[int] = Counter()
    expected = np.zeros(VOCAB)
    for seed in range(1, 400):
        _, tokens, packed = drafted(SampledBench(seed, temperature=0.7))
        q = unpack_probs(packed, len(tokens))[0]
        assert q is not None
        counts[tokens[0]] += 1
        expected[list(q.ids)] += np.array(q.probs, dtype=float)
    seen = np.array([counts[token] for token in range(VOCAB)])

    assert expected.sum() == pytest.approx(399, rel=1e-3)
    is_frequent = expected > 5
    assert ((seen - expected)[is_frequent] ** 2 / expected[is_frequent]).sum() < 22.5  # p = 0.0004 at 5 degrees


def test_what_is_told_ahead_is_what_would_be_answered_with_its_distributions() -> None:
    bench = SampledBench()
    bench.say(TEXT, 4)
    bench.work()
    messages = [message for _, message in bench.handler.push_prefetched() if isinstance(message, PrefetchPush)]
    outcomes = messages[-1].rows[-1].outcomes

    assert 0 < len(outcomes) <= 4
    assert any(outcome.probs for outcome in outcomes)
    for outcome in outcomes:
        other = SampledBench()
        other.say(TEXT, 4)
        other.work()
        assert other.say([*TEXT, 4], *outcome.committed) == (outcome.proposal, outcome.probs)


def test_a_sequence_that_is_not_sampled_any_more_is_told_nothing_of_it() -> None:
    bench = SampledBench()
    drafted(bench)
    bench.work()
    before = Digest([*TEXT, 4, 2])
    row = StepRow(before.name, [1], before.extend([1]).name, 0)
    (reply,) = bench.ask(StepRequest(1, b"ours", 0.0, [row]))

    assert isinstance(reply, DraftReply) and reply.probs == []


def test_probabilities_survive_the_wire_to_the_last_bit() -> None:
    one = RequestSampling(0.7).apply(Distribution((5, 70_000, 3), (0.6, 0.3, 0.05), 1.0))
    packed = pack_probs([one, None, one])

    found = unpack_probs(packed, 3)
    assert found[1] is None
    assert [(q.ids, q.probs) for q in (found[0], found[2]) if q] == [(one.ids, one.probs)] * 2
    assert pack_probs([None, None]) == b"" and unpack_probs(b"", 2) == [None, None]


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def _ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    "packed",
    [
        b"\x01",
        b"\x02" + _ids(1, 2) + _floats(0.5),
        b"\x01" + _ids(-1) + _floats(1.0),
        b"\x01" + _ids(1) + _floats(0.0),
        b"\x01" + _ids(1) + _floats(-0.5),
        b"\x01" + _ids(1) + _floats(1.5),
        b"\x01" + _ids(1) + _floats(float("nan")),
        b"\x02" + _ids(1, 1) + _floats(0.5, 0.5),
        b"\x00\x00",
    ],
)
def test_what_is_no_distribution_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_probs(packed, 1)


def test_a_draft_ends_behind_a_token_that_falls_out_otherwise_here() -> None:
    q = Distribution((1, 2), (0.5, 0.5), 0.0)
    tokens, used = resample_draft([9], 1, [7, 1, 1, 1, 1, 1, 1], [None, *[q] * 6], seed=3, vocab_len=None)

    assert tokens[0] == 7 and used[0] is None  # nobody drew it
    assert tokens[1:-1] == [1] * (len(tokens) - 2) and tokens[-1] == 2
    assert len(tokens) == len(used) < 7


def test_tokens_that_the_target_does_not_have_are_never_drawn() -> None:
    q = Distribution((1, 50, 2), (0.3, 0.4, 0.3), 0.0)
    drawn = Counter(resample_draft([9], 1, [50], [q], seed, vocab_len=50)[0][0] for seed in range(500))

    assert set(drawn) == {1, 2} and min(drawn.values()) > 200
    assert resample_draft([9], 1, [50], [Distribution((50, 51), (0.5, 0.5), 0.0)], 0, vocab_len=50) == ([50], [None])


def test_a_seed_belongs_to_a_request_and_not_to_its_name() -> None:
    told = SyncedSequences()

    def note(name: str | None, *tokens: int) -> int:
        return told.advance(name, np.array(tokens, "<i4"), 1).seed

    first = note("a", 1, 2)
    assert note("a", 1, 2, 3) == first != note("b", 1, 2, 3)
    assert note("a", 1, 2) != first  # the name was used again
    assert note(None, 1, 2) == 0


def test_a_step_that_goes_without_drafts_has_no_distributions() -> None:
    """The service has told ahead and is gone: what was drawn is not submitted, and must not be handed over."""
    client = DraftClient(ClientOptions("ipc:///nowhere/draft.sock"))
    q = pack_probs([RequestSampling(1.0).apply(Distribution((5, 6), (0.5, 0.5), 1.0))])
    row = SequenceUpdate([1, 2, 3, 4], 1, name="a", sampling=RequestSampling(1.0))
    client._sessions.store([PrefetchPush([PrefetchRow(Digest([1, 2, 3]).name, [VerdictDraft([4], [5], q)])])])

    assert client.propose([row]) == [Draft([])]
    assert client.counts.prefetched == 1 and client.counts.unreachable == 1
    client.close()


def test_at_a_deadline_what_was_drafted_in_time_is_tested() -> None:
    """A planner waits for more or less behind a drawn token, by what follows it; all the same the token is tested."""
    session = Session([1, 2], planner_of("sps", {"gamma": 4}), GreedyPicker(), PairModel())
    session.set_sampling(RequestSampling(1.0, seed=3))
    q = DRAFT.distribution((1, 2))
    for _ in range(2):
        assert session.propose() is None
        (node,) = session.rows()
        session.add_distribution(node, q)
    session.submit_ready()

    assert len(session.submitted) == 2 and all(session.sampled_from)
    certain = Session([1, 2], planner_of("sps", {"gamma": 4}), GreedyPicker(), PairModel())
    certain.add_distribution(certain.rows()[0], q)
    certain.submit_ready()
    assert certain.submitted == []


def test_each_row_gets_the_distributions_of_its_own_tokens() -> None:
    """Two requests with equal texts share a session; the second goes on with it in the same step."""
    bench = SampledBench()
    text, _, _ = drafted(bench)
    bench.work()
    before, after = Digest(text[:-1]), Digest(text)
    behind = StepRow(before.name, text[-1:], after.name, 0, None, None, bench.sampling)
    ahead = StepRow(after.name, [1], after.extend([1]).name, 0, None, None, bench.sampling)
    (reply,) = bench.ask(StepRequest(1, b"ours", 0.0, [behind, ahead]))

    assert isinstance(reply, DraftReply)
    for tokens, packed in zip(reply.rows, reply.probs, strict=True):
        assert tokens is not None
        sampled_from = unpack_probs(packed, len(tokens))
        assert all(q is None or token in q.ids for token, q in zip(tokens, sampled_from, strict=True))
    assert any(reply.probs) and reply.probs[0] != reply.probs[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_texts_follow_the_target_with_a_real_service(tmp_path: Path, temperature: float) -> None:
    """Through the wire, with answers told ahead and asked for: three tokens at a time against the exact distribution.

    The target tests as engines do. Most tokens are drafted, and more than half of the drafts are kept.
    """
    with serving(f"ipc://{tmp_path}/draft.sock") as address:
        client = DraftClient(ClientOptions(address, "budget", BUDGET, deadline_s=PATIENCE_S))
        with contextlib.closing(client):
            assert client.hello(PATIENCE_S) is not None
            texts, num_kept, num_drawn = sample_texts(client, temperature)

    assert num_drawn > len(texts)
    assert num_kept > len(texts)
    assert_texts_follow_the_target(texts, temperature)


def test_sampled_texts_that_move_between_services_follow_the_target(tmp_path: Path) -> None:
    """Every text moves while it is decoded. The new service opens it anew; seed and distributions are its own."""
    with serving(f"ipc://{tmp_path}/one.sock") as one, serving(f"ipc://{tmp_path}/two.sock") as two:
        pool = DraftPool(ClientOptions([one, two], "budget", BUDGET, deadline_s=PATIENCE_S))
        with contextlib.closing(pool):
            clients = [service.client for service in pool._services.values()]
            for client in clients:
                assert client.hello(PATIENCE_S) is not None

            def move(number: int, length: int) -> None:
                avoided = (number + (length > 4)) % 2
                clients[avoided].connection.refused_s = time.monotonic()
                clients[1 - avoided].connection.refused_s = None

            texts, num_kept, num_drawn = sample_texts(pool, 1.0, move)

    assert pool.counts.rerouted > len(texts) / 2
    assert pool.counts.faults == 0
    assert num_drawn > len(texts) / 4
    assert num_kept > len(texts) / 8
    assert_texts_follow_the_target(texts, 1.0)


def test_a_text_that_moves_keeps_its_seed(tmp_path: Path) -> None:
    pool = DraftPool(ClientOptions([f"ipc://{tmp_path}/one.sock", f"ipc://{tmp_path}/two.sock"]))
    seeds = []
    with contextlib.closing(pool):
        for number, service in enumerate(pool._services.values()):
            row = SequenceUpdate([1, 2, 3, *range(number + 1)], 1, name="a", sampling=RequestSampling(1.0))
            delta = pool._synced.advance(row.name, row.tokens, row.num_new)
            (prepared,) = service.client.prepare_step([row], [0], [delta])
            seeds += [prepared.wire.sampling.seed] if prepared.wire.sampling else []

    assert len(seeds) == 2 and seeds[0] == seeds[1] > 0


BUDGET = {"gamma": 2, "wait_for_draft": True, "cost_aware": False, "uses_text": False, "uses_memory": False}


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """A service in this process."""
    server = Server(ScriptedEngine(DRAFT), ServiceOptions(address))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield address
    finally:
        server.stop()
        thread.join(PATIENCE_S)


def sample_texts(
    client: DraftSource, temperature: float, before: Callable[[int, int], None] = lambda number, length: None
) -> tuple[list[list[int]], int, int]:
    """Texts of eight tokens, how many draft tokens were kept, and how many of those tested were drawn by chance.

    `before` is called before every question, with the number of the text and its length.
    """
    chance = SeededRandom(random.Random(7))
    texts: list[list[int]] = []
    num_kept = num_drawn = 0
    for number in range(500):
        tokens = [0, 1]
        draft: list[int] = []
        name = f"{number} {os.urandom(4).hex()}"
        sampled_from: Sequence[Distribution | None] = []
        while len(tokens) < 8:
            offers = [
                Candidates((q or Distribution((token,), (1.0,), 0.0)).dense(VOCAB), (token,))
                for token, q in zip(draft, sampled_from or [None] * len(draft), strict=True)
            ]
            offers.append(Candidates(Distribution((), (), 0.0).dense(VOCAB), ()))
            ps = [target_at(temperature, [*tokens, *draft[:length]]) for length in range(len(draft) + 1)]
            verdict = reject(offers, ps, chance)
            new = verdict.committed(draft)
            num_kept += verdict.accepted
            num_drawn += sum(q is not None for q in sampled_from[: verdict.accepted + 1])
            tokens += new
            if len(tokens) < 8:
                before(number, len(tokens))
                row = SequenceUpdate(tokens, len(new), name=name, sampling=RequestSampling(temperature))
                (found,) = client.propose([row])
                draft, sampled_from = found.tokens, found.sampled_from
        texts.append(tokens)
    return texts, num_kept, num_drawn


def assert_texts_follow_the_target(texts: list[list[int]], temperature: float) -> None:
    counts = Counter(tuple(text[5:8]) for text in texts)
    tail: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for text, prob in exact(temperature, [0, 1], 6).items():
        tail[text[3:6]] += prob
    statistic = sum(
        (counts[text] - len(texts) * prob) ** 2 / (len(texts) * prob)
        for text, prob in tail.items()
        if len(texts) * prob > 5
    )
    degrees = sum(len(texts) * prob > 5 for prob in tail.values())
    assert statistic < degrees + 4.5 * np.sqrt(2 * degrees)


def target_at(temperature: float, text: list[int]) -> Any:
    found = TARGET.distribution(tuple(text))
    probs = np.zeros(VOCAB)
    probs[list(found.ids)] = np.array(found.probs, dtype=float) ** (1 / temperature)
    return probs / probs.sum()


def exact(temperature: float, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """The distribution of all texts of this length behind the prompt."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): chance * prob
            for text, chance in texts.items()
            for token, prob in enumerate(target_at(temperature, [*prompt, *text]))
            if prob > 0
        }
    return texts
