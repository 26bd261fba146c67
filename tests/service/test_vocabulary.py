"""A draft with another vocabulary: nothing of it is taken, the reason is told once, and the right one is found."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from specbranch.engines.vocabulary import HASH_LEN, read_fingerprint, read_vocabulary
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.wire.messages import (
    VERSION,
    DraftReply,
    Hello,
    OpenSequences,
    Request,
    StepRequest,
    Welcome,
    decode_request,
    encode,
)
from tests.models import model_path
from tests.service.harness import PATIENCE_S, VOCAB, Walk, WatchedClient, proposed, scripted_service, wait_for

RIGHT, WRONG = (bytes([byte]) * HASH_LEN * 50 for byte in (1, 2))
SIZE = 12_000
ROW = SequenceUpdate([1, 2, 3], 1)
DEADLINE_S = PATIENCE_S


class Draft(threading.Thread):
    """A service in this process, which writes down what it hears and proposes a 5 for every row."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._is_over = threading.Event()
        self.sample = RIGHT
        self.says_hello = True
        self.heard: list[Request] = []

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(self._address)
        while not self._is_over.is_set():
            if router.poll(20):
                client, frame = router.recv_multipart()
                request = decode_request(frame)
                self.heard.append(request)
                if isinstance(request, Hello) and self.says_hello:
                    router.send_multipart((client, encode(Welcome(VERSION, request.round, "draft", SIZE, self.sample))))
                if isinstance(request, StepRequest):
                    router.send_multipart((client, encode(DraftReply(request.round, [[5]] * len(request.rows)))))
        router.close(linger=0)
        context.term()

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def kinds(self) -> list[type[Request]]:
        return [type(request) for request in self.heard]


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[Draft]:
    draft = Draft(f"ipc://{tmp_path}/draft.sock")
    draft.start()
    try:
        yield draft
    finally:
        draft.stop()


@pytest.fixture
def client(tmp_path: Path, draft: Draft) -> Iterator[WatchedClient]:
    options = ClientOptions(
        f"ipc://{tmp_path}/draft.sock", deadline_s=DEADLINE_S, vocab_len=SIZE, vocab_fingerprint=RIGHT
    )
    with contextlib.closing(WatchedClient(options)) as client:
        client.connection.channel.await_writable(PATIENCE_S)
        yield client


def propose_until(client: DraftClient, proposal: list[int]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while proposed(client, ROW) != [proposal]:
        assert time.monotonic() < end_s, client.counts
        time.sleep(0.02)


def test_the_first_call_has_a_draft_already(client: DraftClient, draft: Draft) -> None:
    """The question goes out ahead of the step, and no call waits for it."""
    drafts = [proposed(client, ROW) for _ in range(3)]

    assert drafts == [[[5]]] * 3
    assert draft.kinds() == [Hello, StepRequest, StepRequest, StepRequest]


def test_a_prompt_is_told_of_at_once_and_the_draft_is_known_before_the_first_step(
    client: WatchedClient, draft: Draft
) -> None:
    client.announce_prompts([[1, 2]])
    assert client.watched.await_readable(PATIENCE_S)

    assert proposed(client, ROW) == [[5]]
    assert draft.kinds() == [Hello, OpenSequences, StepRequest]


def test_no_draft_is_taken_from_a_service_that_does_not_say_what_it_is(client: DraftClient, draft: Draft) -> None:
    draft.says_hello = False
    before = [proposed(client, ROW) for _ in range(3)]
    draft.says_hello = True

    assert before == [[[]]] * 3
    assert proposed(client, ROW) == [[5]]


def test_a_draft_with_other_tokens_is_left_alone_and_told_of_once(
    client: WatchedClient, draft: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first call, which learns it, waits for anything."""
    draft.sample = WRONG
    begin_s = time.monotonic()
    assert proposed(client, ROW) == [[]]
    num_waits = len(client.watched.waits_s)
    for _ in range(49):
        client.announce_prompts([[1, 2, 3, 4]])
        assert proposed(client, ROW) == [[]]
    seconds = time.monotonic() - begin_s
    wait_for(lambda: len(draft.heard) >= 2)

    assert client.vocab_mismatch
    assert client.counts.other_vocab == client.counts.calls == 50
    assert client.counts.answered == client.counts.timeouts == client.counts.opened == client.counts.faults == 0
    assert set(draft.kinds()[2:]) <= {Hello} and draft.kinds()[:2] == [
        Hello,
        StepRequest,
    ]  # nothing but a question at times
    assert len(draft.heard) <= 3 + seconds  # it is asked again once a second at most
    assert len(client.watched.waits_s) == num_waits
    (line,) = [line for line in caplog.messages if "vocabulary" in line]
    assert line.startswith("the draft 'draft' is not used, because it has another vocabulary than the target")
    assert "of 50 token ids compared, 50 stand for different text" in line and "choose a draft" in line


def test_a_draft_that_is_replaced_by_the_right_one_is_used_and_by_a_wrong_one_no_more(
    client: DraftClient, draft: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    draft.sample = WRONG
    propose_until(client, [])
    draft.sample = RIGHT
    propose_until(client, [5])
    states = [client.vocab_mismatch]
    draft.sample = WRONG
    client.announce_prompts([[1, 2]])  # a new text: it is asked again
    propose_until(client, [])
    states.append(client.vocab_mismatch)

    assert states == [False, True]
    assert caplog.text.count("is not used") == 2


def test_a_target_that_does_not_know_its_tokens_goes_by_size(tmp_path: Path, draft: Draft) -> None:
    draft.sample = WRONG
    drafts = {}
    for vocab_len in (SIZE, SIZE + 100, SIZE + 200, None):
        options = ClientOptions(f"ipc://{tmp_path}/draft.sock", deadline_s=DEADLINE_S, vocab_len=vocab_len)
        with contextlib.closing(DraftClient(options)) as client:
            client.connection.channel.await_writable(PATIENCE_S)
            drafts[vocab_len] = proposed(client, ROW)

    assert drafts == {SIZE: [[5]], SIZE + 100: [[5]], SIZE + 200: [[]], None: [[5]]}


def test_a_service_that_comes_back_with_the_right_draft_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real service, killed and started; the first one has other tokens."""
    target = {"vocab_len": VOCAB, "vocab_fingerprint": RIGHT}
    options = ClientOptions(f"ipc://{tmp_path}/draft.sock", "pearl", {"gamma": 4}, deadline_s=0.2, **target)  # type: ignore[arg-type]
    with contextlib.closing(DraftClient(options)) as client, caplog.at_level(logging.INFO):
        walk = Walk(client, [1, 2])
        for sample in (WRONG, RIGHT, WRONG, RIGHT):
            with scripted_service(tmp_path, "--vocab-sample", sample.hex()) as service:
                before, end_s = walk.num_accepted, time.monotonic() + PATIENCE_S
                while (walk.num_accepted < before + 5) if sample == RIGHT else not client.vocab_mismatch:
                    assert time.monotonic() < end_s, client.counts
                    walk.step()
                    time.sleep(0.01)
                    assert sample == RIGHT or not walk.proposal
                service.kill()

    walk.assert_text_is_the_targets()
    assert client.counts.faults == client.counts.refused == 0
    assert caplog.text.count("is not used") == 2
    assert caplog.text.count("which has the target's vocabulary") == 2


def test_a_real_draft_works_for_its_own_family_and_for_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SmolLM2, asked by a target of Qwen's and by one of its own; then Qwen at the same address."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    paths = {name: str(model_path(name)) for name in ("smollm2-short", "qwen-coder-0.5b", "qwen-coder-0.5b-dense")}
    address = f"ipc://{tmp_path}/draft.sock"
    options = {
        name: ClientOptions(address, "sps", {"gamma": 4}, deadline_s=PATIENCE_S, **target_of(path))  # type: ignore[arg-type]
        for name, path in paths.items()
    }
    with contextlib.closing(DraftClient(options["qwen-coder-0.5b-dense"])) as qwen:
        with (
            DraftProcess(DraftServiceOptions(paths["smollm2-short"], threads=1, address=address)),
            contextlib.closing(DraftClient(options["smollm2-short"])) as smollm,
        ):
            walk_until_drafted(smollm)
            wrong = [proposed(qwen, ROW) for _ in range(10)]
        states = [smollm.vocab_mismatch, qwen.vocab_mismatch]
        assert not any(draft for drafts in wrong for draft in drafts)
        assert qwen.counts.other_vocab > 5
        assert caplog.text.count("the draft 'smollm2-short.gguf' is not used, because it has another vocabulary") == 1
        with DraftProcess(DraftServiceOptions(paths["qwen-coder-0.5b"], threads=1, address=address)):
            walk_until_drafted(qwen)
    states.append(qwen.vocab_mismatch)

    assert states == [False, True, False]
    assert caplog.text.count("is not used") == 1


def target_of(path: str) -> dict[str, int | bytes | None]:
    """What a proposer would say of a target."""
    found = read_vocabulary(path)
    assert found is not None
    return {"vocab_len": found.size, "vocab_fingerprint": read_fingerprint(path)}


def walk_until_drafted(client: DraftClient) -> None:
    """Decode a text of no sense until something is proposed."""
    tokens, end_s = [504, 2365, 6354], time.monotonic() + PATIENCE_S
    while True:
        tokens.append(260)
        if proposed(client, SequenceUpdate(tokens, 1))[0]:
            return
        assert time.monotonic() < end_s, client.counts
        time.sleep(0.05)
