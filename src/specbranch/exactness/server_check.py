"""`specbranch check --endpoint`: send the same requests to two servers, and report on their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from specbranch.exactness.openai_server import (
    CHAT,
    COMPLETIONS,
    DraftCounts,
    Reply,
    RequestRefused,
    ServerError,
    Unavailable,
)
from specbranch.exactness.prompts import (
    CHOICES,
    NUM_CHOICES,
    REPEATED,
    SERVER_FEATURES,
    STOP,
    TOSS_KEYS,
    Feature,
    greedy_prompts,
)
from specbranch.exactness.server_findings import (
    Answers,
    Greedy,
    Sampled,
    check_server_property,
    drafting,
    flat,
    greedy_equality,
    greedy_together,
    same_distribution,
    unasked,
)
from specbranch.exactness.vllm_check import FULL, CheckSize, Listener
from specbranch.exactness.vllm_findings import FAILED, HOLDS, NOTE, SKIPPED, Finding, is_json
from specbranch.launch.vllm_worker import PromptRequest
from specbranch.version import __version__

T = TypeVar("T")
_NUM_LOGPROBS = 5
_NUM_REPEATS = 8
_STAGE = "sending requests to both servers"


class ServerApi(Protocol):
    """The interface through which the check queries a server; `OpenAIServer` implements it, and tests use a fake."""

    @property
    def url(self) -> str:
        """The URL of the server."""
        ...

    @property
    def model(self) -> str:
        """The name of the model on the server that answers the requests."""
        ...

    @property
    def takes(self) -> Sequence[str]:
        """The paths of OpenAI's API that the server answers: `/completions`, `/chat/completions` or both."""
        ...

    def ask_all(self, asks: Sequence[PromptRequest], at_once: int, on_done: Callable[[int], None]) -> list[list[Reply]]:
        """Send all requests, at most `at_once` at a time; return each answer's choices, in the order of the requests.

        `on_done` is called after each answer with the number of answers so far.
        """
        ...

    def drafts(self) -> DraftCounts | None:
        """Return how many draft tokens were verified and accepted so far; None if the server does not report them."""
        ...

    def is_up(self) -> bool:
        """Return whether the server still answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of a comparison of two servers; at most `at_once` requests are sent at a time.

    `alpha` is the probability of a false alarm in the whole report. A greedy answer may differ at a token whose
    log-probability, according to the reference, is at most `tie` below that of the reference's own token.
    """

    size: CheckSize = FULL
    alpha: float = 1e-3
    seed: int = 0
    tie: float = 0.25
    at_once: int = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two servers: all findings, the options, and the URL and model of each server."""

    options: CompareOptions
    endpoint: Mapping[str, str]
    reference: Mapping[str, str]
    findings: Sequence[Finding]

    @property
    def has_failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.result == FAILED for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON dict."""
        return {
            "holds": not self.has_failed,
            "endpoint": dict(self.endpoint),
            "reference": dict(self.reference),
            **asdict(self.options),
            "versions": {"specbranch": __version__},
            "findings": [asdict(finding) for finding in self.findings],
        }


def compare(endpoint: ServerApi, reference: ServerApi, options: CompareOptions, listen: Listener) -> Comparison:
    """Send the same requests to the reference and then to the endpoint, and return a comparison of the answers.

    `listen` is called with the stage, the number of answers so far and the number of all requests. Raise `ServerError`
    if nothing could be compared.
    """
    questions = _Questions(endpoint, reference, options, listen)
    before = [server.drafts() for server in (reference, endpoint)]
    findings = [*questions.greedy(), *questions.seeds()]
    sampled = [questions.sampled(number, feature) for number, feature in enumerate(SERVER_FEATURES)]
    samples = [one for one in sampled if isinstance(one, Sampled)]
    listen("testing the samples", None, None)
    if samples:
        findings += same_distribution(samples, options.alpha, np.random.default_rng(options.seed))
    findings += [one for one in sampled if isinstance(one, Finding)]
    findings += _properties({one.name: one for one in samples})
    if not any(finding.result in (HOLDS, FAILED) for finding in findings):
        raise ServerError("nothing could be compared: " + "; ".join(findings[0].details or [findings[0].says]))
    if not questions.is_over:
        after = [server.drafts() for server in (reference, endpoint)]
        findings.append(drafting(*(_grown(*pair) for pair in zip(before, after, strict=True))))
    return Comparison(options, _named(endpoint), _named(reference), findings)


class _Questions:
    """Sends the requests of the check to both servers, and turns the answers into findings or samples.

    A check whose requests one of the servers refuses is skipped. After the endpoint has gone down, all further checks
    are skipped, and `is_over` says why.
    """

    def __init__(self, endpoint: ServerApi, reference: ServerApi, options: CompareOptions, listen: Listener) -> None:
        self._servers = {"reference": reference, "endpoint": endpoint}
        self._options = options
        self._listen = listen
        self._takes = [path for path in endpoint.takes if path in reference.takes]
        self.is_over = ""
        self._is_seeded = False
        self._num_done = 0
        self._num_asks = 4 * options.size.num_prompts + 2 * _NUM_REPEATS
        self._num_asks += sum(2 * self._num_requests(feature) for feature in SERVER_FEATURES)
        if not self._takes:
            raise ServerError(
                f"{endpoint.url} answers {_listed(endpoint.takes)} and {reference.url} {_listed(reference.takes)}: "
                f"both must answer {COMPLETIONS}, or both {CHAT}"
            )

    def greedy(self) -> list[Finding]:
        """Send the greedy requests to both servers, one at a time and then together, and return two findings.

        The first says whether the endpoint's answers equal the reference's, the second whether they stay the same when
        the requests are sent together. Where answers differ, ask the reference again, with log-probabilities that may
        explain the difference. If a server gives no answers, return one finding that says why.
        """
        size = self._options.size
        prompts = greedy_prompts(size.num_prompts)
        asks = [PromptRequest(prompt, {"temperature": 0, "max_tokens": size.num_tokens}) for prompt in prompts]
        found = []
        for name, at_once in (("greedy", 1), (f"greedy, {self._options.at_once} at once", self._options.at_once)):
            answers = self._both(name, {"reference": asks, "endpoint": asks}, at_once)
            if isinstance(answers, Finding):
                return [answers]
            found += [[replies[0] for replies in one] for one in answers]
        greedy = Greedy(
            prompts=prompts,
            reference=found[0],
            endpoint=found[1],
            reference_together=found[2],
            endpoint_together=found[3],
        )
        greedy = replace(greedy, explained=self._explained(asks, greedy.differing))
        tie = self._options.tie
        return [greedy_equality(greedy, tie), greedy_together(greedy, self._options.at_once, tie)]

    def seeds(self) -> list[Finding]:
        """Send one sampled request several times without a seed; return a note if a server always answers the same.

        In that case all later sampled requests get a seed, because samples must be independent. Return an empty list if
        both servers vary their answers, and one finding that says why if a server gives no answers.
        """
        asks = REPEATED.asks(_NUM_REPEATS)
        answers = self._both("seeds", dict.fromkeys(self._servers, asks), self._options.at_once)
        if isinstance(answers, Finding):
            return [answers]
        repeating = [role for role, one in zip(self._servers, answers, strict=True) if _is_constant(one)]
        self._is_seeded = bool(repeating)
        says = f"the {' and the '.join(repeating)} repeats itself without a seed, so every sample has one"
        return [unasked("seeds", NOTE, says)] if repeating else []

    def sampled(self, number: int, feature: Feature) -> Sampled | Finding:
        """Sample the prompt of a feature many times from both servers, and return the answers.

        If there are no answers, return a finding that says why. `number` is the feature's index, from which its seeds
        are made, so that no two features share seeds.
        """
        feature = replace(feature, is_seeded=feature.is_seeded or self._is_seeded)
        count, first = self._num_requests(feature), number * len(self._servers)
        asks = {role: feature.asks(count, sample=sample) for sample, role in enumerate(self._servers, first)}
        before = self._servers["endpoint"].drafts()
        answers = self._both(f"distribution: {feature.name}", asks, self._options.at_once)
        if isinstance(answers, Finding):
            return answers
        return Sampled(feature.name, *answers, drafts=_grown(before, self._servers["endpoint"].drafts()))

    def _num_requests(self, feature: Feature) -> int:
        """Return how many requests to send for a feature: those that give `num_samples` choices, but at least 2."""
        return max(2, self._options.size.num_samples // int(feature.sampling.get("n", 1)))

    def _both(
        self, name: str, asks: Mapping[str, Sequence[PromptRequest]], at_once: int
    ) -> tuple[Answers, Answers] | Finding:
        """Send each server its requests, and return the answers of the reference and of the endpoint.

        If a server refuses or fails, return a finding for the check `name` that says why; set `is_over` if the endpoint
        has gone down. Raise `ServerError` if the reference has gone down, or if a server cannot serve requests now.
        """
        if self.is_over:
            return unasked(name, SKIPPED, self.is_over)
        answers: dict[str, Answers] = {}
        for role in self._servers:
            try:
                answers[role] = self._ask(role, asks[role], at_once)
            except RequestRefused as error:
                return unasked(name, SKIPPED, f"the {role} refuses it", str(error))
            except Unavailable:
                raise
            except ServerError as error:
                is_up = self._servers[role].is_up()
                if role == "endpoint":
                    self.is_over = "" if is_up else "the endpoint no longer answers"
                    return unasked(name, FAILED, "the endpoint broke down", str(error))
                if not is_up:
                    raise ServerError(f"the reference no longer answers: {error}") from error
                return unasked(name, SKIPPED, "the reference cannot do it", str(error))
        return answers["reference"], answers["endpoint"]

    def _ask(self, role: str, asks: Sequence[PromptRequest], at_once: int) -> Answers:
        placed = [msgspec.structs.replace(ask, is_chat=self._is_chat(ask)) for ask in asks]
        start = self._num_done
        self._num_done += len(placed)  # before they are sent: after a refusal the rest counts as done too
        return self._servers[role].ask_all(
            placed, at_once, lambda number: self._listen(_STAGE, start + number, self._num_asks)
        )

    def _is_chat(self, ask: PromptRequest) -> bool:
        """Return whether to send a request to `/chat/completions` rather than to `/completions`.

        Requests with a JSON schema go to the former and all others to the latter, unless a server lacks that path.
        """
        first = CHAT if ask.schema is not None else COMPLETIONS
        return (first if first in self._takes else self._takes[0]) == CHAT

    def _explained(self, asks: Sequence[PromptRequest], indexes: Sequence[int]) -> dict[int, Reply]:
        """Ask the reference again, with log-probabilities, and return its answers by index into `asks`.

        Answers without log-probabilities are left out; the result is empty if the request fails.
        """
        again = [
            PromptRequest(asks[index].prompt, {**asks[index].sampling, "logprobs": _NUM_LOGPROBS}) for index in indexes
        ]
        try:
            self._num_asks += len(again)
            answers = self._ask("reference", again, 1)
        except ServerError:
            return {}
        return {index: replies[0] for index, replies in zip(indexes, answers, strict=True) if replies[0].logprobs}


def _properties(samples: Mapping[str, Sampled]) -> list[Finding]:
    """Return findings on properties that every single answer must have, for example that its JSON parses.

    `samples` has the sampled answers by the name of their feature; a property whose feature was not sampled is left
    out.
    """
    return [
        *_property(
            samples.get("JSON schema"),
            "JSON parses",
            "answers that were not cut off",
            lambda answers: [one for one in flat(answers) if one.finish_reason != "length"],
            lambda one: is_json(one.text, TOSS_KEYS),
        ),
        *_property(
            samples.get("stop string"),
            "stop string absent",
            f"{STOP!r} in the text",
            flat,
            lambda one: STOP not in one.text,
        ),
        *_property(samples.get("logprobs"), "logprobs given", "every answer", flat, lambda one: len(one.logprobs) > 0),
        *_property(
            samples.get(CHOICES.name),
            "all choices given",
            CHOICES.name,
            lambda answers: [len(replies) for replies in answers],
            lambda count: count == NUM_CHOICES,
        ),
    ]


def _property(
    sampled: Sampled | None,
    name: str,
    compared: str,
    items: Callable[[Answers], Sequence[T]],
    is_right: Callable[[T], bool],
) -> list[Finding]:
    if sampled is None:
        return []
    return [check_server_property(name, compared, items(sampled.reference), items(sampled.endpoint), is_right)]


def _is_constant(answers: Answers) -> bool:
    return len({reply.text for reply in flat(answers)}) == 1


def _named(server: ServerApi) -> dict[str, str]:
    return {"url": server.url, "model": server.model}


def _grown(before: DraftCounts | None, after: DraftCounts | None) -> DraftCounts | None:
    return None if after is None else after - (before or DraftCounts())


def _listed(paths: Sequence[str]) -> str:
    return " and ".join(paths) or "neither"
