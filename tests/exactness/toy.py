"""A small language model of known distributions behind OpenAI's API: in this process, or as a real HTTP server."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specbranch.exactness.openai_server import CHAT, COMPLETIONS, DraftCounts, Reply, body_of, read_replies
from specbranch.launch.vllm_worker import PromptRequest

WORDS = (" heads,", " tails,", " sun,", " rain,", " cloud,", "<end>")
Probs = list[float]
Rule = Callable[[Probs, random.Random], int]


def plain(p: Probs, chance: random.Random) -> int:
    """Without drafts."""
    return chance.choices(range(len(p)), p)[0]


def speculative(p: Probs, chance: random.Random) -> int:
    """Rejection sampling of a token of a flatter draft distribution, as it should be."""
    q = flatter(p)
    drawn = plain(q, chance)
    if chance.random() < min(1.0, p[drawn] / q[drawn]):
        return drawn
    return plain([max(0.0, one - other) for one, other in zip(p, q, strict=True)], chance)


def gullible(p: Probs, chance: random.Random) -> int:
    """A wrong rule: nine drafted tokens of ten are accepted, whatever the target says."""
    return plain(flatter(p) if chance.random() < 0.9 else p, chance)


def flatter(p: Probs) -> Probs:
    """What the draft thinks."""
    roots = [math.sqrt(one) for one in p]
    return [one / sum(roots) for one in roots]


@dataclass
class Toy:
    """The model with one way of sampling; `refuses` are parameters that it answers with HTTP 400."""

    rule: Rule = plain
    wrong_temperature: float = 1.0
    refuses: Sequence[str] = ()
    seed: int = 0
    keeps_stop: bool = False
    breaks_json: bool = False
    ignores_n: bool = False
    likes: str = ""  # a word that greedy answers of this server prefer at their third token
    noise: float = 0.0  # on logits
    accepts: int | None = None  # of ten draft tokens for each answer; None: it does not tell
    crashes_at: str = ""  # a parameter that ends it
    is_dead: bool = False
    code: int = 500  # of its end
    num_answers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._known: dict[str, Probs] = {}

    def answer(self, body: dict[str, Any], is_chat: bool = False) -> dict[str, Any]:
        """A completion as the API has it; raises ValueError for a parameter that is refused."""
        for name in self.refuses:
            if name in body:
                raise ValueError(f"{name} is not supported")
        with self._lock:
            self.num_answers += 1
            chance = random.Random(body["seed"]) if "seed" in body else self._chance
            num_choices = 1 if self.ignores_n else body.get("n", 1)
            choices = [self._choice(body, is_chat, chance) for _ in range(num_choices)]
        return {"choices": [{"index": index, **choice} for index, choice in enumerate(choices)]}

    def _choice(self, body: dict[str, Any], is_chat: bool, chance: random.Random) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        tokens, logprobs = self._decoded(prompt, body, chance)
        text, reason = "".join(tokens), "length"
        if text.endswith("<end>"):
            text, reason = text.removesuffix("<end>"), "stop"
        for stop in body.get("stop", ()):
            if stop in text and not self.keeps_stop:
                text, reason = text[: text.index(stop)], "stop"
        if "response_format" in body:
            coin = "heads" if "heads" in text else "tails"
            text, reason = json.dumps({"coin": coin, "won": "sun" in text}), "stop"
            text = text[:-1] if self.breaks_json else text
        given: dict[str, Any] = {"finish_reason": reason, "logprobs": None}
        if "logprobs" in body:
            given["logprobs"] = _reported(tokens, logprobs, is_chat)
        return {**given, "message": {"content": text}} if is_chat else {**given, "text": text}

    def _decoded(
        self, prompt: str, body: dict[str, Any], chance: random.Random
    ) -> tuple[list[str], list[dict[str, float]]]:
        tokens: list[str] = []
        logprobs = []
        while len(tokens) < body["max_tokens"] and tokens[-1:] != ["<end>"]:
            logits = self._logits(prompt + "".join(tokens[-2:]))
            logprobs.append(_top(logits))
            if not body.get("temperature", 1.0):
                logits = [logit + chance.gauss(0, self.noise) for logit in logits] if self.noise else logits
                best = WORDS[logits.index(max(logits))]
                tokens.append(self.likes if self.likes and len(tokens) == 2 else best)
                continue
            p = _processed(logits, tokens, body, self.wrong_temperature)
            tokens.append(WORDS[self.rule(p, chance)])
        return tokens, logprobs

    def _logits(self, text: str) -> Probs:
        if text not in self._known:
            numbers = random.Random(zlib.crc32(text[-40:].encode()))
            self._known[text] = [numbers.gauss(0, 1.8) - (word == "<end>") for word in WORDS]
        return self._known[text]


def _top(logits: Probs) -> dict[str, float]:
    total = math.log(sum(math.exp(logit) for logit in logits))
    return {word: logit - total for word, logit in zip(WORDS, logits, strict=True)}


def _processed(logits: Probs, tokens: Sequence[str], body: dict[str, Any], wrong: float) -> Probs:
    """What is sampled from: penalties, temperature, then top-p and top-k."""
    presence, frequency = body.get("presence_penalty", 0), body.get("frequency_penalty", 0)
    scale = body.get("temperature", 1.0) * wrong
    weights = [
        math.exp((logit - presence * (word in tokens) - frequency * tokens.count(word)) / scale)
        for word, logit in zip(WORDS, logits, strict=True)
    ]
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    kept, mass = set(), 0.0
    for index in order[: body.get("top_k", len(order))]:
        if mass < body.get("top_p", 1.0) * sum(weights):
            kept.add(index)
            mass += weights[index]
    return [weight / mass if index in kept else 0.0 for index, weight in enumerate(weights)]


def _reported(tokens: Sequence[str], logprobs: Sequence[dict[str, float]], is_chat: bool) -> dict[str, Any]:
    own = [likely[token] for token, likely in zip(tokens, logprobs, strict=True)]
    if not is_chat:
        return {"tokens": list(tokens), "token_logprobs": own, "top_logprobs": list(logprobs)}
    rows = zip(tokens, own, logprobs, strict=True)
    return {
        "content": [
            {
                "token": token,
                "logprob": logprob,
                "top_logprobs": [{"token": word, "logprob": one} for word, one in likely.items()],
            }
            for token, logprob, likely in rows
        ]
    }


@dataclass
class InProcess:
    """A toy in place of a server."""

    toy: Toy
    url: str = "http://toy/v1"
    model: str = "toy"
    takes: Sequence[str] = (COMPLETIONS, CHAT)

    def ask_all(self, asks: Sequence[PromptRequest], at_once: int, on_done: Callable[[int], None]) -> list[list[Reply]]:
        return [read_replies(self.toy.answer(body_of(ask, self.model), ask.is_chat)) for ask in asks]

    def drafts(self) -> DraftCounts | None:
        return None

    def is_up(self) -> bool:
        return True


@contextlib.contextmanager
def serving(toy: Toy, models: Sequence[str] = ("toy",), key: str | None = None) -> Iterator[str]:
    """The toy behind HTTP; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics" and toy.accepts is not None:
                self._send(200, _metrics(toy), "text/plain")
            elif self.path == "/v1/models":
                self._json(200, {"data": [{"id": name} for name in models]})
            else:
                self._json(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                self._json(401, {"error": "Unauthorized"})
            elif toy.is_dead or (toy.crashes_at and toy.crashes_at in body):
                toy.is_dead = True
                self._json(toy.code, {"error": {"message": "the engine died"}})
            else:
                self._answer(body)

        def _answer(self, body: dict[str, Any]) -> None:
            is_chat = self.path == f"/v1{CHAT}"
            try:
                self._json(200, toy.answer(body, is_chat))
            except ValueError as error:
                self._json(400, {"error": {"message": str(error), "code": 400}})

        def _json(self, code: int, document: dict[str, Any]) -> None:
            self._send(code, json.dumps(document), "application/json")

        def _send(self, code: int, text: str, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Listener(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _metrics(toy: Toy) -> str:
    """vLLM's counters."""
    accepted = (toy.accepts or 0) * toy.num_answers
    return "".join(
        f'vllm:spec_decode_num_{name}_tokens_total{{engine="0",model_name="toy"}} {float(value)}\n'
        for name, value in (("draft", 10 * toy.num_answers), ("accepted", accepted))
    )
