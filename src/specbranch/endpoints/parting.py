"""Where an answer leaves the reference's, and how sure the reference was there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specbranch.endpoints.reply import Reply

_SHOWN_TEXT = 20  # characters


@dataclass(frozen=True, slots=True)
class Parting:
    """The reference's token at a position, and the other answer's.

    `gap` is by how much the reference preferred its own, in log-probability; more than that if `is_least`, because the
    other token is not among those that it reported.
    """

    position: int
    token: str
    other_token: str
    gap: float
    is_least: bool = False

    def is_tie(self, tie: float) -> bool:
        """Whether rounding explains it, if that moves log-probabilities by at most `tie`."""
        return self.gap <= tie and not self.is_least


def part(reference: Reply, other: Reply) -> Parting | None:
    """Where the other text leaves the reference's, by the smallest gap that explains it; None if tokens do not tell.

    Only the reference needs log-probabilities. Which tokens the other text is made of is not known, and one token can
    be the beginning of another, so there may be several explanations.
    """
    at = 0
    found: list[Parting] = []
    for position, (token, likely) in enumerate(zip(reference.tokens, reference.logprobs, strict=True)):
        here, there = reference.text[at:], other.text[at:]
        is_over = not there and other.finish_reason == "stop"
        found += [
            Parting(position, token, candidate, likely[token] - logprob)
            for candidate, logprob in likely.items()
            if (_ends(candidate) if is_over else _leads(candidate, here, there))
        ]
        if not there.startswith(token):
            if not found and (here.startswith(token) or not here):
                gap = likely[token] - min(likely.values())
                return Parting(position, token, there[:_SHOWN_TEXT], gap, is_least=True)
            break
        at += len(token)
    return min(found, key=lambda one: one.gap, default=None)


def first_difference(one: str, other: str) -> int:
    """The first character where two texts differ."""
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)


def _leads(token: str, here: str, there: str) -> bool:
    """Whether a token leads to the other text and away from the reference's."""
    return token != "" and there.startswith(token) and not here.startswith(token)


def _ends(token: str) -> bool:
    """Whether a token looks like one that ends a text, such as </s> or <|im_end|>."""
    return token == "" or (token.startswith("<") and token.endswith(">"))
