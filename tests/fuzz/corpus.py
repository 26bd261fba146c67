"""The corpus: one JSON file a target, its cases by name. A character stands for the byte of its number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def read_cases(name: str) -> dict[str, bytes]:
    cases: dict[str, str] = json.loads((CORPUS / f"{name}.json").read_text())
    return {case: text.encode("latin-1") for case, text in cases.items()}


def write_cases(name: str, cases: Mapping[str, bytes]) -> None:
    texts = {case: data.decode("latin-1") for case, data in sorted(cases.items())}
    (CORPUS / f"{name}.json").write_text(json.dumps(texts, indent=1) + "\n")
