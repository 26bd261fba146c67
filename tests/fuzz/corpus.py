"""The corpus, corpus.json: the cases of each target by name. A character stands for the byte of its number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.json")


def read_cases(target: str) -> dict[str, bytes]:
    return {case: text.encode("latin-1") for case, text in _read().get(target, {}).items()}


def write_cases(target: str, cases: Mapping[str, bytes]) -> None:
    texts = {case: data.decode("latin-1") for case, data in sorted(cases.items())}
    corpus = {**_read(), target: texts}
    CORPUS.write_text(json.dumps(dict(sorted(corpus.items())), indent=1) + "\n")


def _read() -> dict[str, dict[str, str]]:
    corpus: dict[str, dict[str, str]] = json.loads(CORPUS.read_text())
    return corpus
