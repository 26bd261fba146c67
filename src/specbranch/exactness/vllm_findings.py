"""Findings from the outputs of bare vLLM and of vLLM with the proposer.

The functions are pure: they take the results of finished runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from specbranch.exactness.prompts import UNDRAFTED
from specbranch.exactness.statistics import Compared, LogprobMeans, Outcomes, compare_all
from specbranch.launch.vllm_worker import DecodedOutput, DecodeResult, PromptRequest

HOLDS, FAILED, NOTE, SKIPPED = "holds", "FAILED", "note", "skipped"
TIE = 1e-5  # log-probabilities in float32 that are this close count as equal
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report: the result of a check of `n` answers or tokens, and the explanation in `says`.

    `figures` holds numbers for programs, and `details` further lines of text.
    """

    name: str
    compared: str
    n: int
    result: str
    says: str
    p_value: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    details: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where the two outputs for the prompt at `index` differ; a token is None after an output's end.

    `gap` is by how much bare vLLM preferred its own token, in log-probability; None if unknown.
    """

    index: int
    position: int
    token: int | None
    other_token: int | None
    gap: float | None

    @property
    def is_tie(self) -> bool:
        """Whether bare vLLM gave both tokens the same probability, up to rounding."""
        return self.gap is not None and self.gap <= TIE


def divergences(bare: Sequence[DecodedOutput], other: Sequence[DecodedOutput]) -> list[Divergence]:
    """Return the first difference of every pair of outputs that differ; `bare` and `other` are for the same prompts."""
    found = []
    for index, (one, two) in enumerate(zip(bare, other, strict=True)):
        if one.tokens == two.tokens:
            continue
        pairs = zip(one.tokens, two.tokens, strict=False)
        shortest = min(len(one.tokens), len(two.tokens))
        position = next((at for at, (left, right) in enumerate(pairs) if left != right), shortest)
        token, other_token = (
            answer.tokens[position] if position < len(answer.tokens) else None for answer in (one, two)
        )
        found.append(Divergence(index, position, token, other_token, _gap(one, position, token, other_token)))
    return found


def greedy_equality(name: str, asks: Sequence[PromptRequest], bare: DecodeResult, other: DecodeResult) -> Finding:
    """Return a finding on whether greedy outputs with the proposer (`other`) equal bare vLLM's token by token.

    Outputs may differ where both tokens were equally likely. `asks` are the requests of both runs.
    """
    found = divergences(bare.answers, other.answers)
    real = [one for one in found if not one.is_tie]
    equal = len(asks) - len(found)
    says = f"{equal} of {len(asks)} equal, {other.accepted} of {other.submitted} draft tokens accepted"
    if len(found) > len(real):
        says += f", {len(found) - len(real)} differ at a tie"
    result, says = _checked(other, FAILED if real else HOLDS, says)
    figures = {"equal": equal, "ties": len(found) - len(real), **_drafts(other)}
    details = [_shown(one, asks[one.index].prompt) for one in found]
    return Finding(
        name=name,
        compared="with the proposer : bare, greedy",
        n=len(asks),
        result=result,
        says=says,
        figures=figures,
        details=details,
    )


def logprob_agreement(bare: DecodeResult, other: DecodeResult) -> Finding:
    """Return a finding on whether chosen tokens have the same log-probabilities in bare vLLM and with the proposer.

    Tokens after the first difference of two outputs are not compared.
    """
    missing, largest, num_compared = 0, 0.0, 0
    for one, two in zip(bare.answers, other.answers, strict=True):
        missing += _num_missing(one) + _num_missing(two)
        # After the first difference the sequences are no longer comparable.
        for token, other_token, left, right in zip(one.tokens, two.tokens, one.logprobs, two.logprobs, strict=False):
            if token != other_token:
                break
            if token in left and token in right:
                num_compared += 1
                largest = max(largest, abs(left[token] - right[token]))
    is_right = not missing and largest <= LOGPROB_TOLERANCE
    says = f"largest difference {largest:.1e} (allowed {LOGPROB_TOLERANCE:g}), {missing} missing"
    result, says = _checked(other, HOLDS if is_right and num_compared else FAILED, says)
    figures = {"largest_difference": largest, "missing": missing, **_drafts(other)}
    return Finding(
        name="logprobs agree",
        compared="chosen tokens, greedy",
        n=num_compared,
        result=result,
        says=says,
        figures=figures,
    )


def divergence_rates(dtype: str, alone: DecodeResult, together: DecodeResult, other: DecodeResult) -> Finding:
    """Return a note on how often rounding in the serving data type changes a greedy output.

    Outputs of bare vLLM in a batch (`together`) are compared with those of the proposer (`other`), and with those of
    bare vLLM for one request at a time (`alone`).
    """
    own, ours = (divergences(together.answers, done.answers) for done in (alone, other))
    n = len(together.answers)
    says = f"proposer {len(ours)}/{n}{_largest_gap(ours)}; vLLM's own noise {len(own)}/{n}{_largest_gap(own)}"
    figures = {
        "dtype": dtype,
        "proposer": len(ours),
        "own": len(own),
        "proposer_gaps": [one.gap for one in ours],
        "own_gaps": [one.gap for one in own],
        **_drafts(other),
    }
    return Finding(
        name=f"divergence in {dtype}",
        compared="proposer : bare, beside bare alone : in a batch",
        n=n,
        result=NOTE,
        says=says,
        figures=figures,
    )


def same_distribution(
    features: Sequence[tuple[str, DecodeResult, DecodeResult]], alpha: float, rng: np.random.Generator
) -> list[Finding]:
    """Return findings on whether outputs with the proposer follow the distribution of bare vLLM.

    Each of `features` is a name, the run of bare vLLM, and the run with the proposer. The family-wise false-alarm rate
    is at most `alpha`.
    """
    named: list[tuple[str, DecodeResult, Outcomes | LogprobMeans]] = []
    for name, bare, other in features:
        named.append((name, other, Outcomes(_values(name, bare), _values(name, other))))
        if _has_surprise(bare, other):
            named.append((f"{name}: surprise", other, LogprobMeans(_surprises(bare), _surprises(other))))
    compared = compare_all([pair for _, _, pair in named], alpha, rng)
    return [
        _distribution_finding(name, other, one, alpha) for (name, other, _), one in zip(named, compared, strict=True)
    ]


def check_property(name: str, compared: str, other: DecodeResult, is_right: Callable[[DecodedOutput], bool]) -> Finding:
    """Return a finding on whether every output with the proposer has a property, which `is_right` tests."""
    wrong = [answer for answer in other.answers if not is_right(answer)]
    says = f"{len(wrong)} of {len(other.answers)} outputs break it"
    if not other.answers:
        says = "nothing was checked: there are no such outputs"
    result, says = _checked(other, HOLDS if other.answers and not wrong else FAILED, says)
    details = [f"{answer.text!r} ({answer.finish_reason})" for answer in wrong[:5]]
    return Finding(
        name=name,
        compared=compared,
        n=len(other.answers),
        result=result,
        says=says,
        figures={"wrong": len(wrong)},
        details=details,
    )


def seeds_repeat(bare: tuple[DecodeResult, DecodeResult], other: tuple[DecodeResult, DecodeResult]) -> Finding:
    """Return a note on how often a repeated request with a seed gives the same tokens.

    Both arguments hold two runs of the same requests: in bare vLLM, and with the proposer.
    """
    own, ours = (
        sum(one.tokens == two.tokens for one, two in zip(first.answers, second.answers, strict=True))
        for first, second in (bare, other)
    )
    n = len(bare[0].answers)
    says = f"same tokens again: bare {own}/{n}, with the proposer {ours}/{n}"
    figures = {"bare": own, "proposer": ours}
    return Finding(name="seed repeats", compared="the same request twice", n=n, result=NOTE, says=says, figures=figures)


def drop_truncated(done: DecodeResult) -> DecodeResult:
    """Return a run's result without the outputs that ended because of `max_tokens`."""
    return msgspec.structs.replace(done, answers=[one for one in done.answers if one.finish_reason != "length"])


def is_json(text: str, keys: Sequence[str]) -> bool:
    """Return whether a text is a JSON object with exactly these keys."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and sorted(value) == sorted(keys)


def has_all_logprobs(answer: DecodedOutput) -> bool:
    """Return whether vLLM reported the log-probability of every chosen token."""
    return _num_missing(answer) == 0


def _distribution_finding(name: str, other: DecodeResult, compared: Compared, alpha: float) -> Finding:
    says = f"{other.accepted} of {other.submitted} draft tokens accepted"
    if compared.shift is not None:
        says += f"; {noticeable(compared.shift)}"
    result = FAILED if compared.p_value <= alpha else HOLDS
    result, says = (_checked_undrafted if name in UNDRAFTED else _checked)(other, result, says)
    return Finding(
        name=f"distribution: {name}",
        compared=compared.what,
        n=len(other.answers),
        result=result,
        says=says,
        p_value=compared.p_value,
        figures={**figures_of(compared), **_drafts(other)},
    )


def noticeable(shift: float) -> str:
    """Return a phrase on the least shift (total-variation distance) that a test detects; with 1 it detects none."""
    return f"would notice a shift of {shift:.2f}" if shift < 1 else "too few samples to notice any shift"


def figures_of(compared: Compared) -> dict[str, Any]:
    """Return a test's uncorrected p-value, statistic and detectable shift as a JSON dict."""
    test = compared.test
    return {"raw_p_value": test.p_value, "statistic": test.statistic, "noticed_shift": compared.shift}


def _values(name: str, done: DecodeResult) -> list[Hashable]:
    # A stop string may cut a token in two, so there the text is the output.
    if name == "stop string":
        return [(answer.text, answer.finish_reason) for answer in done.answers]
    return [tuple(answer.tokens) for answer in done.answers]


def _has_surprise(bare: DecodeResult, other: DecodeResult) -> bool:
    return all(answer.logprobs for done in (bare, other) for answer in done.answers)


def _surprises(done: DecodeResult) -> list[float]:
    return [
        sum(reported.get(token, 0.0) for token, reported in zip(answer.tokens, answer.logprobs, strict=False))
        for answer in done.answers
    ]


def _checked(other: DecodeResult, result: str, says: str) -> tuple[str, str]:
    """Return a finding's result and explanation; make it a failure if no draft token was accepted in the run.

    A run without accepted draft tokens has checked nothing.
    """
    if not other.accepted:
        return FAILED, f"nothing was checked: no draft token accepted in {other.attempts} attempts ({says})"
    return result, says if other.attempts == 1 else f"{says}; in attempt {other.attempts}, none accepted before"


def _checked_undrafted(other: DecodeResult, result: str, says: str) -> tuple[str, str]:
    """Return a finding's result and explanation for requests that must get no drafts.

    Make it a failure if any draft token was verified.
    """
    if other.submitted:
        return FAILED, f"such requests must get no drafts ({says})"
    return result, says.replace("0 of 0 draft tokens accepted", "such requests get no drafts")


def _drafts(other: DecodeResult) -> dict[str, int]:
    return {"submitted": other.submitted, "accepted": other.accepted, "attempts": other.attempts}


def _num_missing(answer: DecodedOutput) -> int:
    num_reported = sum(token in reported for token, reported in zip(answer.tokens, answer.logprobs, strict=False))
    return len(answer.tokens) - num_reported


def _gap(answer: DecodedOutput, position: int, token: int | None, other: int | None) -> float | None:
    """Return by how much `token` was preferred to `other` in log-probability; a lower bound if `other` is not reported.

    `answer` is the output of bare vLLM, which chose `token`. Return None if an output has ended at this position, or if
    the log-probability of `token` is not reported.
    """
    if token is None or other is None or position >= len(answer.logprobs):
        return None
    reported = answer.logprobs[position]
    return reported[token] - reported.get(other, min(reported.values())) if token in reported else None


def _largest_gap(found: Sequence[Divergence]) -> str:
    gaps = [one.gap for one in found if one.gap is not None]
    return f" (largest gap {max(gaps):.2g})" if gaps else ""


def _shown(one: Divergence, prompt: str) -> str:
    gap = "unknown" if one.gap is None else f"{one.gap:.2g}"
    return f"{prompt!r} at token {one.position}: bare {one.token}, with the proposer {one.other_token}, gap {gap}"
