"""A client of OpenAI-compatible servers: send requests, read answers and log-probabilities, count draft tokens."""

from __future__ import annotations

import http.client
import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specbranch.errors import SpecBranchError
from specbranch.launch.vllm_worker import PromptRequest
from specbranch.service.client.stats import parse_metrics_text

_MAX_MESSAGE_LEN = 300  # characters of a server's message
_SUBMITTED, _ACCEPTED = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
COMPLETIONS, CHAT = "/completions", "/chat/completions"
_MIN_LOGPROB = -9999.0


class ServerError(SpecBranchError, RuntimeError):
    """A server cannot be used for the check: it is unreachable, or its answer is an error or not in OpenAI's form."""


class Unavailable(ServerError):
    """A server cannot serve requests now, for example because a key is missing, it is overloaded or it is too slow.

    The whole check ends, because this says nothing about the server's output.
    """


class RequestRefused(ServerError):
    """A server refuses a request (HTTP 4xx or 501), for example because it does not support a parameter."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How many draft tokens a server has verified (`submitted`) and accepted.

    They are counted since the server started or since our first request, depending on the server.
    """

    submitted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return f"{self.accepted} of {self.submitted} draft tokens accepted"

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.submitted - other.submitted, self.accepted - other.accepted)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and how to use it: URL, API key, and the time to wait for an answer.

    `option` is the command-line option that sets the URL; error messages name it.
    """

    option: str
    url: str
    key: str | None = None
    timeout_s: float = 300.0

    @property
    def base(self) -> str:
        """The URL with /v1 at its end; raises `ServerError` if it is no HTTP URL or contains a name or password."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{self.option} is {self.url!r}; give a URL such as http://127.0.0.1:8000")
        if "@" in parts.netloc:
            raise ServerError(f"{self.option} holds a password; put the key into a variable, see --api-key-env")
        path = parts.path.rstrip("/")
        return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"


class OpenAIServer:
    """A client of one model on an OpenAI-compatible server; several threads may use it at a time.

    `takes` lists the paths that the server answers: `/completions`, `/chat/completions` or both.
    """

    def __init__(self, address: Address, model: str | None = None) -> None:
        self._address = address
        self._base = address.base
        self.model = model or self._only_model()
        self.takes = [path for path in (COMPLETIONS, CHAT) if self._has(path)]
        self._lock = threading.Lock()
        self._timed = DraftCounts()

    @property
    def url(self) -> str:
        """The server's URL with /v1 at its end, for reports."""
        return self._base

    def ask_all(self, asks: Sequence[PromptRequest], at_once: int, on_done: Callable[[int], None]) -> list[list[Reply]]:
        """Send all requests, at most `at_once` at a time; return each answer's choices, in the order of the requests.

        `on_done` is called after each answer with the number of answers so far.
        """
        answers = []
        with ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(self._ask, ask) for ask in asks]
            try:
                for number, one in enumerate(waiting, start=1):
                    answers.append(one.result())
                    on_done(number)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return answers

    def drafts(self) -> DraftCounts | None:
        """Return how many draft tokens the server has verified and accepted so far; None if it reports none.

        The numbers come from vLLM's metrics page, or from the timings in llama.cpp's answers.
        """
        try:
            page = self._open(f"{self._base.removesuffix('/v1')}/metrics").decode()
        except (ServerError, UnicodeDecodeError):
            page = ""
        counted: dict[str, int] = {}
        for sample in parse_metrics_text(page):
            if sample.name in (_SUBMITTED, _ACCEPTED):
                counted[sample.name] = counted.get(sample.name, 0) + int(sample.value)
        if counted:
            return DraftCounts(counted.get(_SUBMITTED, 0), counted.get(_ACCEPTED, 0))
        return self._timed if self._timed.submitted else None

    def is_up(self) -> bool:
        """Send a short request and return whether the server answers."""
        try:
            self._has(self.takes[0])
        except ServerError:
            return False
        return True

    def _only_model(self) -> str:
        option = {"--endpoint": "--model"}.get(self._address.option, f"{self._address.option}-model")
        try:
            names = [one["id"] for one in self._get("/models")["data"]]
        except RequestRefused as error:
            raise ServerError(f"{error}; name the model by {option}") from error
        except (KeyError, TypeError) as error:
            raise ServerError(f"{self._base}/models is not a list of models; name the model by {option}") from error
        if len(names) != 1:
            raise ServerError(f"{self._base} has {len(names)} models ({', '.join(names)}); choose one by {option}")
        return str(names[0])

    def _has(self, path: str) -> bool:
        try:
            self._ask(PromptRequest("Hello", {"max_tokens": 1, "temperature": 0}, is_chat=path == CHAT))
        except RequestRefused:
            return False
        return True

    def _ask(self, ask: PromptRequest) -> list[Reply]:
        path = CHAT if ask.is_chat else COMPLETIONS
        document = self._get(path, body_of(ask, self.model))
        try:
            timings = document.get("timings") or {}
            if "draft_n" in timings:
                with self._lock:
                    timed = self._timed
                    self._timed = DraftCounts(
                        timed.submitted + timings["draft_n"], timed.accepted + timings.get("draft_n_accepted", 0)
                    )
            return read_replies(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self._base}{path} answered, but not in OpenAI's form: {_short(str(document))}"
            ) from error

    def _get(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        text = self._open(f"{self._base}{path}", None if body is None else json.dumps(body).encode())
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ServerError(
                f"{self._base}{path} answered, but not with JSON; does {self._address.option} name its API?"
            )
        return document

    def _open(self, url: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._address.key is not None:
            headers["Authorization"] = f"Bearer {self._address.key}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers), timeout=self._address.timeout_s
            ) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(url, error.code, error.read()) from error
        except TimeoutError as error:
            raise Unavailable(f"{url} did not answer in {self._address.timeout_s:g} s; see --timeout-s") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"cannot reach {url}: {reason}; start the server, or correct {self._address.option}"
            ) from error


def body_of(ask: PromptRequest, model: str) -> dict[str, Any]:
    """Return the JSON body that sends a request to `model` through OpenAI's API."""
    body = {"model": model, **ask.sampling}
    if ask.schema is not None:
        schema = {"name": "answer", "schema": ask.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if not ask.is_chat:
        return {**body, "prompt": ask.prompt}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return {**body, "messages": [{"role": "user", "content": ask.prompt}]}


def _refusal(url: str, code: int, body: bytes) -> ServerError:
    says = f"{url} answers with HTTP {code}: {_message(body)}"
    if code in (401, 403):
        return Unavailable(f"{says}; put its key into an environment variable and name that with --api-key-env")
    if code in (429, 502, 503, 504):
        return Unavailable(f"{says}; try again later, or lower --concurrency")
    return RequestRefused(says) if 400 <= code < 500 or code == 501 else ServerError(says)


def _message(body: bytes) -> str:
    """Return the error message in the body of an answer, JSON or plain text, shortened to one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return _short(text)
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return _short(str(found))


def _short(text: str) -> str:
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return line if len(line) <= _MAX_MESSAGE_LEN else f"{line[:_MAX_MESSAGE_LEN]}..."


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice of an answer: its text and its finish reason.

    If the request asked for log-probabilities, `tokens` has the tokens of the text, and `logprobs` has for each of them
    the log-probabilities of the likeliest tokens and of the chosen one.
    """

    text: str
    finish_reason: str | None = None
    tokens: Sequence[str] = ()
    logprobs: Sequence[Mapping[str, float]] = ()

    def __str__(self) -> str:
        return f"{self.text!r} ({self.finish_reason})"

    @property
    def total_logprob(self) -> float:
        """The log-probability of the whole text: the sum of the log-probabilities of its tokens."""
        return sum(likely[token] for token, likely in zip(self.tokens, self.logprobs, strict=True))


def read_replies(document: Mapping[str, Any]) -> list[Reply]:
    """Return the choices of a completion or chat completion, in the order of their indexes.

    Raise KeyError, TypeError or ValueError for any other document.
    """
    choices = sorted(document["choices"], key=lambda choice: int(choice.get("index", 0)))
    if not choices:
        raise ValueError("no choices")
    return [_read_choice(choice) for choice in choices]


def _read_choice(choice: Mapping[str, Any]) -> Reply:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    tokens, logprobs = _read_logprobs(choice.get("logprobs") or {})
    return Reply(text or "", choice.get("finish_reason"), tokens, logprobs)


def _read_logprobs(found: Mapping[str, Any]) -> tuple[list[str], list[dict[str, float]]]:
    if found.get("content"):  # the form of chats, which some servers use for completions too
        rows = [(one["token"], _number(one["logprob"]), _likeliest(one)) for one in found["content"]]
    elif found.get("tokens"):
        likeliest = [
            {token: _number(value) for token, value in (likely or {}).items()}
            for likely in found.get("top_logprobs") or [None] * len(found["tokens"])
        ]
        rows = list(zip(found["tokens"], map(_number, found["token_logprobs"]), likeliest, strict=True))
    else:
        rows = []
    return [token for token, _, _ in rows], [{**likely, token: own} for token, own, likely in rows]


def _likeliest(one: Mapping[str, Any]) -> dict[str, float]:
    return {other["token"]: _number(other["logprob"]) for other in one.get("top_logprobs") or ()}


def _number(logprob: Any) -> float:
    """Return a log-probability as a finite number; raise ValueError for NaN.

    Minus infinity, which some servers write for an impossible token, becomes `_MIN_LOGPROB`.
    """
    number = max(float(logprob), _MIN_LOGPROB)
    if math.isnan(number):
        raise ValueError("a log-probability is not a number")
    return number
