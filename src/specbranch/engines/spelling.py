"""How tokens look to people: the text that a token of a vocabulary stands for."""

from __future__ import annotations

from collections.abc import Callable

from specbranch.engines.protocol import EngineError
from specbranch.engines.vocabulary import read_vocabulary

_SPACE = "\u2581"  # SentencePiece writes it for a space


def speller(model: str | None) -> Callable[[int], str]:
    """What each token id of a model is spelled like; `#7` for those of which nothing is known here."""
    try:
        vocabulary = read_vocabulary(model) if model else None
    except EngineError:
        vocabulary = None
    tokens = (vocabulary.tokens if vocabulary else None) or {}

    def spell(token: int) -> str:
        text = tokens.get(token)
        return f"#{token}" if text is None else _readable(text)

    return spell


def _readable(token: str) -> str:
    """The text of a token: byte-level vocabularies have a printable character for each byte."""
    try:
        return bytes(_BYTES[character] for character in token).decode(errors="replace")
    except KeyError:
        return token.replace(_SPACE, " ")


def _byte_characters() -> dict[str, int]:
    """Printable characters of Latin-1 stand for themselves, all other bytes for the characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()
