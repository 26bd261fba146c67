"""What tokens look like."""

from __future__ import annotations

import json
from pathlib import Path

from specbranch.engines.vocabulary import token_text


def write_vocabulary(path: Path, *tokens: str) -> str:
    document = {"model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}}}
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    return str(path)


def test_bytes_and_spaces_are_readable(tmp_path: Path) -> None:
    spell = token_text(write_vocabulary(tmp_path, "Ġdef", "Ċ", "Ã¤", "\u2581the", "<|end|>"))

    assert [spell(token) for token in range(5)] == [" def", "\n", "ä", " the", "<|end|>"]


def test_tokens_that_nobody_knows_are_numbers(tmp_path: Path) -> None:
    assert token_text(None)(7) == "#7"
    assert token_text("no-such-model")(7) == "#7"
    assert token_text(write_vocabulary(tmp_path, "a"))(7) == "#7"
