"""One server over real HTTP: what it is asked, and what its answers and refusals become."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specbranch.exactness.openai_server import (
    CHAT,
    COMPLETIONS,
    Address,
    DraftCounts,
    OpenAIServer,
    Reply,
    RequestRefused,
    ServerError,
    Unavailable,
    body_of,
    read_replies,
)
from specbranch.launch.vllm_worker import PromptRequest
from tests.exactness.toy import Toy, serving

GREEDY = PromptRequest("Coin:", {"temperature": 0, "max_tokens": 4})


def opened(url: str, model: str | None = None, key: str | None = None, timeout_s: float = 30.0) -> OpenAIServer:
    return OpenAIServer(Address("--endpoint", url, key, timeout_s), model)


def ask(server: OpenAIServer, *asks: PromptRequest, at_once: int = 1) -> list[list[Reply]]:
    return server.ask_all(asks, at_once, lambda number: None)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_server_is_found_with_its_model_and_its_paths(suffix: str) -> None:
    with serving(Toy()) as url:
        server = opened(url + suffix)

    assert (server.url, server.model, server.takes) == (f"{url}/v1", "toy", [COMPLETIONS, CHAT])


def test_answers_are_in_the_order_of_the_requests() -> None:
    prompts = [f"Prompt {number}:" for number in range(20)]
    asks = [
        PromptRequest(prompt, {"temperature": 0, "max_tokens": 6}, is_chat=number % 2 > 0)
        for number, prompt in enumerate(prompts)
    ]
    heard: list[int] = []
    with serving(Toy()) as url:
        server = opened(url)
        together = server.ask_all(asks, 8, heard.append)
        alone = ask(server, *asks)

    assert together == alone
    assert len({replies[0].text for replies in alone}) > 10
    assert heard == list(range(1, 21))


def test_requests_run_at_the_same_time() -> None:
    class Slow(Toy):
        most = running = 0

        def answer(self, body: dict[str, Any], is_chat: bool = False) -> dict[str, Any]:
            self.running += 1
            self.most = max(self.most, self.running)
            time.sleep(0.05)
            self.running -= 1
            return super().answer(body, is_chat)

    toy = Slow()
    with serving(toy) as url:
        server = opened(url)
        ask(server, *[GREEDY] * 12, at_once=4)
        assert toy.most == 4
        toy.most = 0
        ask(server, *[GREEDY] * 3)
        assert toy.most == 1


def test_a_request_in_both_forms() -> None:
    plain = PromptRequest("p", {"logprobs": 2, "max_tokens": 3}, {"type": "object"})
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    common = {"model": "m", "max_tokens": 3, "response_format": {"type": "json_schema", "json_schema": schema}}

    assert body_of(plain, "m") == {**common, "logprobs": 2, "prompt": "p"}
    assert body_of(PromptRequest(plain.prompt, plain.sampling, plain.schema, is_chat=True), "m") == {
        **common,
        "logprobs": True,
        "top_logprobs": 2,
        "messages": [{"role": "user", "content": "p"}],
    }


def test_a_refusal_says_what_the_server_says() -> None:
    with serving(Toy(refuses=["top_k"])) as url:
        server = opened(url)
        with pytest.raises(RequestRefused, match="HTTP 400: top_k is not supported"):
            ask(server, PromptRequest("p", {"top_k": 5, "max_tokens": 1}))


def test_a_server_without_completions_takes_chats() -> None:
    with serving(Toy(refuses=["prompt"])) as url:
        assert opened(url).takes == [CHAT]


def test_a_server_that_breaks_is_no_longer_up() -> None:
    toy = Toy(crashes_at="top_k")
    with serving(toy) as url:
        server = opened(url)
        assert server.is_up()
        with pytest.raises(ServerError, match="HTTP 500: the engine died") as error:
            ask(server, PromptRequest("p", {"top_k": 5, "max_tokens": 1}))

        assert not isinstance(error.value, RequestRefused | Unavailable)
        assert not server.is_up()


@pytest.mark.parametrize("code", [429, 503])
def test_a_server_that_has_no_time_is_not_said_to_be_wrong(code: int) -> None:
    with serving(Toy(crashes_at="top_k", code=code)) as url:
        server = opened(url)
        with pytest.raises(Unavailable, match=f"HTTP {code}: .*lower --concurrency"):
            ask(server, PromptRequest("p", {"top_k": 5, "max_tokens": 1}))


def test_draft_tokens_are_those_of_vllms_metrics() -> None:
    with serving(Toy(accepts=4)) as url:
        server = opened(url)
        before = server.drafts()
        ask(server, GREEDY, GREEDY)
        after = server.drafts()

    assert before is not None and after is not None
    assert after - before == DraftCounts(20, 8)


def test_draft_tokens_are_those_that_llama_cpp_tells() -> None:
    class LlamaCpp(Toy):
        def answer(self, body: dict[str, Any], is_chat: bool = False) -> dict[str, Any]:
            timings = {"draft_n": 5, "draft_n_accepted": 3}
            return {**super().answer(body, is_chat), "timings": timings if body["max_tokens"] > 1 else {}}

    with serving(LlamaCpp()) as url:
        server = opened(url)
        assert server.drafts() is None
        ask(server, *[GREEDY] * 6, at_once=3)

        assert server.drafts() == DraftCounts(30, 18)


@pytest.mark.parametrize(
    ("models", "advice"),
    [([], "has 0 models"), (["a", "b"], r"has 2 models \(a, b\); choose one by --model")],
)
def test_a_model_must_be_chosen_among_several(models: list[str], advice: str) -> None:
    with serving(Toy(), models) as url:
        with pytest.raises(ServerError, match=advice):
            opened(url)
        assert opened(url, "b").model == "b"


def test_a_key_goes_with_every_request_and_is_asked_for() -> None:
    with serving(Toy(), key="secret") as url:
        with pytest.raises(ServerError, match=r"HTTP 401: Unauthorized; put its key .* --api-key-env") as error:
            opened(url)
        assert not isinstance(error.value, RequestRefused)
        assert len(ask(opened(url, key="secret"), GREEDY)) == 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "file:///etc/hosts", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match="give a URL such as"):
        opened(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ServerError, match="--api-key-env") as error:
        opened("http://me:secret@host")

    assert "secret" not in str(error.value)


def test_nobody_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ServerError, match=r"cannot reach .*refused; start the server, or correct --endpoint"):
        opened(f"http://127.0.0.1:{port}")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_server_that_never_answers_is_left(listener: socket.socket) -> None:
    with pytest.raises(ServerError, match=r"did not answer in 0.2 s; see --timeout-s"):
        opened(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"<html>hello</html>", "not with JSON; does --endpoint name its API"),
        (b'{"choices": [{"words": "x"}]}', "not in OpenAI's form"),
        (b"[]", "not with JSON"),
    ],
)
def test_a_server_of_another_kind(listener: socket.socket, answer: bytes, says: str) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ServerError, match=says):
        opened(f"http://127.0.0.1:{listener.getsockname()[1]}", "any")
    thread.join()


LEGACY = {
    "text": " heads",
    "finish_reason": "length",
    "logprobs": {"tokens": [" he", "ads"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{" ta": -1.0}, None]},
}
CHAT_CHOICE = {
    "message": {"content": " heads"},
    "finish_reason": "length",
    "logprobs": {
        "content": [
            {"token": " he", "logprob": -0.5, "top_logprobs": [{"token": " ta", "logprob": -1.0}]},
            {"token": "ads", "logprob": -0.25},
        ]
    },
}
BOTH = Reply(" heads", "length", [" he", "ads"], [{" ta": -1.0, " he": -0.5}, {"ads": -0.25}])


@pytest.mark.parametrize(
    "choice", [LEGACY, CHAT_CHOICE, {**CHAT_CHOICE, "text": " heads"}], ids=["completion", "chat", "llama.cpp"]
)
def test_both_forms_say_the_same(choice: dict[str, object]) -> None:
    assert read_replies({"choices": [choice]}) == [BOTH]
    assert BOTH.total_logprob == -0.75


def test_choices_are_in_the_order_of_their_index() -> None:
    choices = [{"index": 1, "text": "b"}, {"index": 0, "text": "a", "logprobs": None}]

    assert [reply.text for reply in read_replies({"choices": choices})] == ["a", "b"]


def test_a_chat_without_text_is_empty() -> None:
    assert read_replies({"choices": [{"message": {"content": None}}]}) == [Reply("", None, [], [])]


def test_an_impossible_token_has_a_finite_number() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": float("-inf")}]}
    [reply] = read_replies({"choices": [{"text": "a", "logprobs": logprobs}]})

    assert reply.logprobs == [{"b": -9999.0, "a": -0.5}]
    logprobs["token_logprobs"] = [float("nan")]
    with pytest.raises(ValueError, match="not a number"):
        read_replies({"choices": [{"text": "a", "logprobs": logprobs}]})


@pytest.mark.parametrize("document", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [3]}, {"choices": None}])
def test_anything_else_is_an_error(document: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        read_replies(document)
