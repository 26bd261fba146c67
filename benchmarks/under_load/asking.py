"""One request to an OpenAI-compatible server by the real client: what came, when, and what is wrong with it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from under_load.traffic import ANIMAL, SCHEMA, WHOLE, Request

TIMEOUT_S = 300.0
# vLLM's server closes a connection that was idle for 5 s, and the client keeps one for as long: a request that is sent at
# just that moment is lost. The client of these runs gives idle connections up before.
_KEEP_S = 2.0


@dataclass(slots=True)
class Answer:
    """Texts and how each ended; times since the request, None where it was not streamed or nothing came."""

    texts: list[str] = field(default_factory=list)
    endings: list[str | None] = field(default_factory=list)
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Time for each token after the first piece; of streams with several tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


def client_for(url: str) -> Any:
    """The client; it never tries again, so that every failure is seen."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(limits=_limits())
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0, http_client=http)


def _limits() -> Any:
    import httpx

    return httpx.Limits(max_connections=256, max_keepalive_connections=128, keepalive_expiry=_KEEP_S)


async def ask(client: Any, model: str, request: Request) -> Answer:
    """The answer; never raises: what went wrong is in it."""
    answer = Answer()
    try:
        if request.kind == SCHEMA:
            await _chat(client, model, request, answer)
        elif request.kind == WHOLE or request.n > 1:
            await _whole(client, model, request, answer)
        else:
            await _stream(client, model, request, answer)
        answer.error = fault_of(request, answer)
    except Exception as error:
        answer.error = f"{type(error).__name__}: {str(error)[:300]}"
    return answer


def fault_of(request: Request, answer: Answer) -> str | None:
    """What is wrong with an answer that came; None if nothing is."""
    if len(answer.texts) != request.n:
        return f"{len(answer.texts)} texts instead of {request.n}"
    if request.leaves_after is not None:
        return None
    if any(ending not in ("stop", "length") for ending in answer.endings):
        return f"ended by {answer.endings}"
    most = request.n * request.max_tokens
    if not (most if request.is_to_the_last else 1) <= answer.num_tokens <= most:
        return f"{answer.num_tokens} tokens of {most}"
    if request.kind == SCHEMA:
        return _misfit(answer.texts[0])
    return None


def _misfit(text: str) -> str | None:
    """What the schema does not allow in a text."""
    try:
        found = json.loads(text)
    except ValueError:
        return f"no JSON: {text!r}"
    allowed = {name: field["enum"] for name, field in ANIMAL["properties"].items()}  # type: ignore[index,attr-defined]
    fits = set(found) == set(allowed) and all(found[name] in values for name, values in allowed.items())
    return None if fits else f"not by the schema: {text!r}"


def _arguments(model: str, request: Request) -> dict[str, Any]:
    return {"model": model, "max_tokens": request.max_tokens, "temperature": request.temperature}


async def _whole(client: Any, model: str, request: Request, answer: Answer) -> None:
    reply = await client.completions.create(
        **_arguments(model, request),
        prompt=request.prompt,
        n=request.n,
        extra_body={"ignore_eos": request.is_to_the_last},
    )
    answer.texts = [choice.text for choice in reply.choices]
    answer.endings = [choice.finish_reason for choice in reply.choices]
    answer.num_tokens = reply.usage.completion_tokens


async def _chat(client: Any, model: str, request: Request, answer: Answer) -> None:
    schema = {"name": "animal", "schema": ANIMAL, "strict": True}
    reply = await client.chat.completions.create(
        **_arguments(model, request),
        messages=[{"role": "user", "content": f"{request.prompt}\nDescribe an animal as JSON."}],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    answer.texts = [choice.message.content or "" for choice in reply.choices]
    answer.endings = [choice.finish_reason for choice in reply.choices]
    answer.num_tokens = reply.usage.completion_tokens


async def _stream(client: Any, model: str, request: Request, answer: Answer) -> None:
    """A stream of one text; it is left in the middle by who wants no more."""
    start_s = time.monotonic()
    stream = await client.completions.create(
        **_arguments(model, request),
        prompt=request.prompt,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": request.is_to_the_last},
    )
    pieces: list[str] = []
    ending = None
    async for chunk in stream:
        if chunk.usage is not None:
            answer.num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            pieces.append(choice.text)
            ending = choice.finish_reason or ending
            answer.last_s = time.monotonic() - start_s
            answer.first_s = answer.last_s if answer.first_s is None else answer.first_s
        if request.leaves_after is not None and len(pieces) >= request.leaves_after:
            await stream.close()
            break
    answer.texts, answer.endings = ["".join(pieces)], [ending]
