"""One answer of the target: its text and its stats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbranch.cli.painter import Run
from specbranch.launch.vllm_engine import Piece


@dataclass(slots=True)
class Answer:
    """An answer that grows piece by piece. The first piece ends the prefill; every later one is a round."""

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    rounds: int = 0
    accepted: int = 0
    wait_s: float = 0.0
    finish_reason: str | None = None
    is_stopped: bool = False  # by the user
    pieces: list[tuple[float, list[Run]]] = field(default_factory=list)  # seconds since it was asked for; text
    _first_s: float | None = None
    _last_s: float | None = None
    _num_first: int = 0

    def take(self, piece: Piece, runs: list[Run]) -> None:
        """Add the output of one engine step, whose text was split into what was drafted and what was not."""
        self.pieces.append((piece.at_s - self.asked_s, runs))
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason
        self._last_s = piece.at_s
        if self._first_s is None:
            self._first_s, self._num_first = piece.at_s, len(piece.tokens)
        elif piece.tokens:
            self.rounds += 1
            self.accepted += len(piece.tokens) - 1

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self._last_s - self._first_s if self._first_s is not None and self._last_s is not None else 0.0

    @property
    def first_token_s(self) -> float | None:
        """Time to first token."""
        return self._first_s - self.asked_s if self._first_s is not None else None

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, without the prefill."""
        return (len(self.tokens) - self._num_first) / self.decode_s if self.decode_s else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Accepted draft tokens per round."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the decoding time in which the target waited for drafts."""
        return min(1.0, self.wait_s / self.decode_s) if self.decode_s else 0.0

    def stats(self) -> str:
        """One line for people."""
        parts = [f"{len(self.tokens)} tokens", f"{self.tokens_per_s:.1f} tokens/s"]
        if self.first_token_s is not None:
            parts.append(f"first token after {self.first_token_s:.2f} s")
        if self.accepted or self.wait_s:
            parts.append(f"{self.accepted_per_round:.2f} draft tokens accepted per round")
        if self.wait_s:  # known at the end
            parts.append(f"waited {self.wait_share:.0%}")
        return " · ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        names = ("text", "tokens", "tokens_per_s", "first_token_s", "rounds", "accepted", "accepted_per_round")
        pieces = [
            {"at_s": round(at_s, 4), "runs": [[run.text, run.is_drafted] for run in runs]} for at_s, runs in self.pieces
        ]
        return {**{name: getattr(self, name) for name in (*names, "wait_s", "finish_reason")}, "pieces": pieces}
