"""Findings from the answers of two servers: where greedy answers differ, and whether samples are alike.

The functions are pure: they send no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from specbranch.exactness.openai_server import DraftCounts, Reply
from specbranch.exactness.statistics import Compared, LogprobMeans, Outcomes, compare_all
from specbranch.exactness.vllm_findings import FAILED, HOLDS, NOTE, SKIPPED, Finding, figures_of, noticeable

T = TypeVar("T")
Answers = Sequence[Sequence[Reply]]  # the choices of each request
_EXCERPT_LEN, _TOKEN_LEN = 24, 20  # characters
_MAX_CELLS = 50
_RARE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Greedy answers of both servers to requests sent one at a time, and to the same requests sent together.

    For prompts whose answers differ, `explained` has one more answer of the reference, with log-probabilities, by the
    prompt's index.
    """

    prompts: Sequence[str]
    reference: Sequence[Reply]
    endpoint: Sequence[Reply]
    reference_together: Sequence[Reply]
    endpoint_together: Sequence[Reply]
    explained: Mapping[int, Reply] = field(default_factory=dict)

    @property
    def differing(self) -> list[int]:
        """The indexes of the prompts whose four answers, two from each server, are not all equal."""
        others = (self.endpoint, self.reference_together, self.endpoint_together)
        return sorted({index for other in others for index in _differing(self.reference, other)})

    @property
    def is_noisy(self) -> bool:
        """Whether the reference gave different answers to the same prompt."""
        again = any(not _is_same(reply, self.reference[index]) for index, reply in self.explained.items())
        return again or bool(_differing(self.reference, self.reference_together))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The answers of both servers to the requests of one sampling feature.

    `drafts` counts the endpoint's draft tokens during these requests; None if the endpoint does not report them.
    """

    name: str
    reference: Answers
    endpoint: Answers
    drafts: DraftCounts | None = None


@dataclass(frozen=True, slots=True)
class _Difference:
    """Two different greedy answers to the prompt at `index`, the second of which is compared with the first.

    They first differ at the index `character`: there the first continues with `was`, the second with `became`.
    `parting` is the token where they differ; None if it is not known.
    """

    index: int
    character: int
    was: str
    became: str
    parting: TokenDivergence | None
    is_references: bool  # the reference gave this answer too

    def is_explained(self, tie: float) -> bool:
        return self.is_references or (self.parting is not None and self.parting.is_tie(tie))

    def shown(self, prompt: str) -> str:
        where = f"{prompt!r} at character {self.character}: {self.was!r} became {self.became!r}"
        if self.is_references:
            return f"{where}; the reference gave this answer too"
        if self.parting is None:
            return f"{where}; gap unknown"
        gap = f"more than {self.parting.gap:.2g}" if self.parting.is_least else f"{self.parting.gap:.2g}"
        token, other = self.parting.token, self.parting.other_token
        return f"{where}; token {self.parting.position} of the reference: {token!r}, not {other!r}, gap {gap}"


def greedy_equality(greedy: Greedy, tie: float) -> Finding:
    """Return a finding on whether the endpoint's greedy answers to requests sent one at a time equal the reference's.

    An answer may differ at a token that the reference preferred by at most `tie` in log-probability.
    """
    found = _differences(greedy, greedy.reference, greedy.endpoint)
    return _greedy_finding("greedy", "endpoint : reference, one request at a time", greedy, found, tie)


def greedy_together(greedy: Greedy, at_once: int, tie: float) -> Finding:
    """Return a finding on whether the endpoint's greedy answers stay the same if `at_once` requests are sent together.

    An answer may differ at a token that the reference preferred by at most `tie`, as in `greedy_equality`.
    """
    found = _differences(greedy, greedy.endpoint, greedy.endpoint_together)
    return _greedy_finding(f"greedy, {at_once} at once", "endpoint : the same one at a time", greedy, found, tie)


def same_distribution(samples: Sequence[Sampled], alpha: float, rng: np.random.Generator) -> list[Finding]:
    """Return findings on whether both servers sample from one distribution: one for each feature, one for all together.

    The family-wise false-alarm rate is at most `alpha`. If all answers to a feature have log-probabilities, the means
    of the answers' log-probabilities are compared, else the distributions of the answers themselves.
    """
    *compared, together = compare_all([_pair(one) for one in samples], alpha, rng, together=True)
    findings = [
        _distribution_finding(one.name, len(one.endpoint), test, alpha, one.drafts)
        for one, test in zip(samples, compared, strict=True)
    ]
    n = sum(len(one.endpoint) for one in samples)
    return [*findings, _distribution_finding("all together", n, together, alpha, None)]


def check_server_property(
    name: str, compared: str, reference: Sequence[T], endpoint: Sequence[T], is_right: Callable[[T], bool]
) -> Finding:
    """Return a finding on whether every answer of the endpoint has a property, which `is_right` tests.

    The check is skipped if an answer of the reference lacks the property, or if there are no answers.
    """
    own, wrong = ([one for one in answers if not is_right(one)] for answers in (reference, endpoint))
    says = f"{len(wrong)} of {len(endpoint)} answers break it"
    result = FAILED if wrong else HOLDS
    if own:
        result, says = SKIPPED, f"{len(own)} of {len(reference)} answers of the reference break it; is it supported?"
    elif not reference or not endpoint:
        result, says = SKIPPED, "there are no answers to check"
    return Finding(
        name=name,
        compared=compared,
        n=len(endpoint),
        result=result,
        says=says,
        figures={"wrong": len(wrong), "reference_wrong": len(own)},
        details=[str(one) for one in wrong[:5]] if result == FAILED else (),
    )


def drafting(reference: DraftCounts | None, endpoint: DraftCounts | None) -> Finding:
    """Return a finding on whether the endpoint accepted draft tokens; if not, speculative decoding was not checked.

    None stands for a server that does not report draft tokens.
    """
    result, says = NOTE, "the server does not report draft tokens; make sure that speculative decoding is on"
    if endpoint is not None:
        result = HOLDS if endpoint.accepted else FAILED
        says = str(endpoint) if endpoint.accepted else f"nothing was checked: {endpoint}"
    if reference is not None and reference.submitted:
        says += f"; the reference drafts too ({reference.submitted} tokens)"
    figures = {} if endpoint is None else asdict(endpoint)
    return Finding(name="drafts", compared="by the endpoint", n=1, result=result, says=says, figures=figures)


def unasked(name: str, result: str, says: str, message: str | None = None) -> Finding:
    """Return a finding without figures, for example on a check that could not be made.

    `name` and `result` are those of the finding, `says` gives the reason, and `message` the server's error message.
    """
    return Finding(name=name, compared="", n=0, result=result, says=says, details=[message] if message else ())


def flat(answers: Answers) -> list[Reply]:
    """Return the choices of all answers in one list."""
    return [reply for replies in answers for reply in replies]


def _differing(ones: Sequence[Reply], others: Sequence[Reply]) -> list[int]:
    return [index for index, pair in enumerate(zip(ones, others, strict=True)) if not _is_same(*pair)]


def _is_same(one: Reply, other: Reply) -> bool:
    return (one.text, one.finish_reason) == (other.text, other.finish_reason)


def _differences(greedy: Greedy, ones: Sequence[Reply], others: Sequence[Reply]) -> list[_Difference]:
    found = []
    for index in _differing(ones, others):
        one, other = ones[index], others[index]
        explained = greedy.explained.get(index)
        answers = (greedy.reference[index], greedy.reference_together[index], *([explained] if explained else []))
        character = first_difference(one.text, other.text)
        found.append(
            _Difference(
                index,
                character,
                _excerpt(one, character),
                _excerpt(other, character),
                find_divergence(explained, other) if explained else None,
                any(_is_same(other, answer) for answer in answers),
            )
        )
    return found


def _excerpt(reply: Reply, character: int) -> str:
    """Return at most 24 characters of an answer from index `character` on; its finish reason if it ends there."""
    return reply.text[character : character + _EXCERPT_LEN] or f"(end: {reply.finish_reason})"


def _greedy_finding(name: str, compared: str, greedy: Greedy, found: Sequence[_Difference], tie: float) -> Finding:
    n = len(greedy.prompts)
    open_ = [one for one in found if not one.is_explained(tie)]
    unknown = [one for one in open_ if one.parting is None]
    says = f"{n - len(found)} of {n} equal"
    if len(found) > len(open_):
        says += f", {len(found) - len(open_)} differ by rounding (gap {tie:g} or less)"
    if greedy.is_noisy:
        own = len(_differing(greedy.reference, greedy.reference_together))
        says += f"; the reference itself changes its answers ({own} of {n} when asked together)"
    result = FAILED if open_ else HOLDS
    if open_ and len(unknown) == len(open_):
        says += f"; {len(unknown)} of unknown gap: an error, or a tie that rounding decides. Serve both in float32"
        result = NOTE if greedy.is_noisy else FAILED
    gaps = [one.parting.gap for one in found if one.parting is not None]
    return Finding(
        name=name,
        compared=compared,
        n=n,
        result=result,
        says=says,
        figures={"equal": n - len(found), "explained": len(found) - len(open_), "gaps": gaps},
        details=[one.shown(greedy.prompts[one.index]) for one in found],
    )


def _pair(sampled: Sampled) -> Outcomes | LogprobMeans:
    if all(reply.logprobs for reply in (*flat(sampled.reference), *flat(sampled.endpoint))):
        return LogprobMeans(_surprises(sampled.reference), _surprises(sampled.endpoint))
    return Outcomes(*group_by_prefix(_outcomes(sampled.reference), _outcomes(sampled.endpoint)))


def _outcomes(answers: Answers) -> list[str]:
    """Return one choice of each answer as a string: choice 0 of the first answer, choice 1 of the second, and so on.

    After the last choice, choice 0 follows again. So each answer counts once, and all choices are tested. Each string
    also holds the finish reason and whether all choices of the answer are equal.
    """
    return [_outcome(replies[number % len(replies)], replies) for number, replies in enumerate(answers)]


def _outcome(chosen: Reply, replies: Sequence[Reply]) -> str:
    is_one = all(_is_same(chosen, other) for other in replies)
    return f"{'=' if is_one else '+'}{chosen.text}\0{chosen.finish_reason}"


def _surprises(answers: Answers) -> list[float]:
    return [sum(reply.total_logprob for reply in replies) for replies in answers]


def _distribution_finding(name: str, n: int, compared: Compared, alpha: float, drafts: DraftCounts | None) -> Finding:
    result = FAILED if compared.p_value <= alpha else HOLDS
    could_not_fail = compared.shift == 1 or (drafts is not None and not drafts.accepted)
    says = [] if drafts is None else [str(drafts)]
    says += [] if compared.shift is None else [noticeable(compared.shift)]
    return Finding(
        name=f"distribution: {name}",
        compared=compared.what,
        n=n,
        result=NOTE if result == HOLDS and could_not_fail else result,
        says="; ".join(says),
        p_value=compared.p_value,
        figures={**figures_of(compared), **({} if drafts is None else asdict(drafts))},
    )


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """The position of the token where two answers differ, with the tokens of the reference and of the other answer.

    `gap` is by how much the reference preferred its own token, in log-probability; with `is_least` it is a lower
    bound, because the reference did not report the other token.
    """

    position: int
    token: str
    other_token: str
    gap: float
    is_least: bool = False

    def is_tie(self, tie: float) -> bool:
        """Return whether rounding can explain the difference: the gap is known, and it is at most `tie`."""
        return self.gap <= tie and not self.is_least


def find_divergence(reference: Reply, other: Reply) -> TokenDivergence | None:
    """Return the token where the other text diverges from the reference's; None if no reported token fits the other.

    Only the reference needs log-probabilities: the reported tokens are its alternatives at each position. Of the other
    reply only the text is known, and one token can be a prefix of another, so several tokens may fit: the one whose
    log-probability is nearest to that of the reference's own token is returned.
    """
    at = 0
    found: list[TokenDivergence] = []
    for position, (token, likely) in enumerate(zip(reference.tokens, reference.logprobs, strict=True)):
        here, there = reference.text[at:], other.text[at:]
        is_over = not there and other.finish_reason == "stop"
        found += [
            TokenDivergence(position, token, candidate, likely[token] - logprob)
            for candidate, logprob in likely.items()
            if (_ends(candidate) if is_over else _leads(candidate, here, there))
        ]
        if not there.startswith(token):
            if not found and (here.startswith(token) or not here):
                gap = likely[token] - min(likely.values())
                return TokenDivergence(position, token, there[:_TOKEN_LEN], gap, is_least=True)
            break
        at += len(token)
    return min(found, key=lambda one: one.gap, default=None)


def first_difference(one: str, other: str) -> int:
    """Return the index of the first character where two texts differ; if there is none, the length of the shorter."""
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)


def _leads(token: str, here: str, there: str) -> bool:
    """Return whether `token` begins `there`, the rest of the other text, but not `here`, that of the reference."""
    return token != "" and there.startswith(token) and not here.startswith(token)


def _ends(token: str) -> bool:
    """Return whether a token looks like an end token, such as </s> or <|im_end|>."""
    return token == "" or (token.startswith("<") and token.endswith(">"))


def group_by_prefix(ones: Sequence[str], others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return both samples of strings, each string cut to its longest prefix that is common in both samples together.

    A prefix is common if at least 5 strings, and at least about 2 % of all, begin with it. As the prefixes depend only
    on the pooled strings, which a permutation does not change, a permutation test stays exact.
    """
    pooled = [*ones, *others]
    enough = max(_RARE, len(pooled) // _MAX_CELLS)
    counts = Counter(text[:end] for text in pooled for end in range(len(text) + 1))

    def cell(text: str) -> str:
        return next((text[:end] for end in range(len(text), 0, -1) if counts[text[:end]] >= enough), "")

    return [cell(text) for text in ones], [cell(text) for text in others]
