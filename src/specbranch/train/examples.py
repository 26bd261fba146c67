"""Examples for H-RAD: target features at a position of an answer, and how many draft tokens were accepted after it.

A position is a token that the target said. Its features are the hidden states at the position that predicted it, and
its own embedding; its run is how many of the draft's first choices in a row were right from there on. On the true
sequence that is the same as drafting a window and comparing it: a greedy draft leaves the true sequence only where it
is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.errors import SpecBranchError
from specbranch.trace import Answer, read_trace

FORMAT = "specbranch-examples"
VERSION = 1
SPLITS = ("train", "held-out", "test")
_SPLIT_OF = ("test", "held-out", "train", "train", "train", "test", "train", "train")

Array = NDArray[Any]


class ExamplesError(SpecBranchError, ValueError):
    """A directory that holds no examples, or none of the kind asked for."""


@dataclass(frozen=True, slots=True)
class Card:
    """What the examples of a directory were collected from."""

    target: str
    draft: str
    num_layers: int
    hidden_len: int
    temperature: float
    tasks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in self.__slots__}}


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows of equal number: one for each position.

    `runs` are cut by the end of the answer where `left`, the tokens after the position, is no larger. `distributions`
    holds how the draft's next distribution looks: confidence, second probability, entropy.
    """

    card: Card
    features: Array  # [n, d_in] float16
    distributions: Array  # [n, 3] float32
    runs: Array  # [n] int32
    left: Array  # [n] int32
    tasks: Array  # [n] int32, index into the card's tasks
    prompts: Array  # [n] int64, a name of the prompt

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, chosen: Array | slice) -> Examples:
        """The rows of an index or a mask."""
        rows = ("features", "distributions", "runs", "left", "tasks", "prompts")
        return replace(self, **{name: getattr(self, name)[chosen] for name in rows})

    def settled(self, window: int) -> Examples:
        """Without positions so near the end of an answer that nobody knows what the window would have given."""
        return self.take((self.runs < self.left) | (self.left >= window))

    def split(self, name: str) -> Examples:
        """One of `SPLITS`; all positions of a prompt are in the same one."""
        return self.take(np.array([split_of(int(prompt)) == name for prompt in self.prompts], dtype=bool))

    def of_task(self, task: str) -> Examples:
        """The examples of one task."""
        return self.take(self.tasks == self.card.tasks.index(task))

    def classes(self, window: int) -> Array:
        """H-RAD's classes: none, some or all of the window were accepted."""
        return np.where(self.runs == 0, 0, np.where(self.runs >= window, 2, 1))


def split_of(prompt: int) -> str:
    """Which split a prompt belongs to, by its name alone."""
    return _SPLIT_OF[prompt % len(_SPLIT_OF)]


def name_of(text: str) -> int:
    """A prompt's name: the same sequence has the same one in every collection."""
    return zlib.crc32(text.encode())


def positions(answer: Answer) -> tuple[Array, Array, Array]:
    """Distributions, runs and tokens left for each position of an answer but the last."""
    nexts = answer.distributions[1:]
    looks = [
        [
            float(distribution.probs[0]),
            float(distribution.probs[1]) if len(distribution.probs) > 1 else 0.0,
            distribution.entropy,
        ]
        for distribution in nexts
    ]
    left = np.arange(len(nexts), 0, -1, dtype=np.int32)
    return np.array(looks, dtype=np.float32).reshape(-1, 3), np.array(answer.runs()[1:-1], dtype=np.int32), left


def write_part(directory: Path, number: int, arrays: dict[str, Array]) -> None:
    """Write one part of a collection; it is there as a whole or not at all."""
    from safetensors.numpy import save_file

    path = part_path(directory, number)
    draft = path.with_suffix(".part")
    save_file(arrays, str(draft))
    draft.rename(path)


def part_path(directory: Path, number: int) -> Path:
    """Where a part stands."""
    return directory / f"part-{number:04}.safetensors"


def trace_path(directory: Path, number: int) -> Path:
    """Where the answers of a part stand."""
    return _beside(part_path(directory, number))


def _beside(part: Path) -> Path:
    return part.with_suffix(".jsonl.gz")


def write_card(directory: Path, card: Card) -> None:
    """Write what the examples come from."""
    (directory / "card.json").write_text(json.dumps(card.as_json(), indent=1) + "\n")


def read_card(directory: Path) -> Card:
    """What the examples of a directory come from."""
    try:
        document = json.loads((directory / "card.json").read_bytes())
        if document.pop("format") != FORMAT or document.pop("version") != VERSION:
            raise ExamplesError(f"{directory} holds no examples of this version; collect them anew")
        return Card(**{**document, "tasks": tuple(document["tasks"])})
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ExamplesError(f"{directory} holds no examples; `specbranch train collect` makes them") from error


def read_examples(directories: Sequence[Path]) -> Examples:
    """All examples of collections of one pair, with their features."""
    from safetensors.numpy import load_file

    cards = [read_card(directory) for directory in directories]
    for card, directory in zip(cards, directories, strict=True):
        if replace(card, temperature=0.0) != replace(cards[0], temperature=0.0):
            raise ExamplesError(f"{directory} is of another pair, other layers or other tasks than {directories[0]}")
    parts = [load_file(str(path)) for directory in directories for path in sorted(directory.glob("part-*.safetensors"))]
    if not parts:
        raise ExamplesError(f"{directories[0]} holds no finished part; let `specbranch train collect` run to its end")
    return Examples(cards[0], **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def read_answers(directory: Path) -> list[tuple[str, int, Answer]]:
    """The answers of a collection in the order of its examples, each with its task and the name of its prompt."""
    from safetensors.numpy import load_file

    card = read_card(directory)
    found = []
    for path in sorted(directory.glob("part-*.safetensors")):
        part = load_file(str(path))
        row = 0
        for answer in read_trace(_beside(path)).answers:
            if len(answer.tokens) > 1:  # one token has no position
                found.append((card.tasks[part["tasks"][row]], int(part["prompts"][row]), answer))
            row += len(answer.tokens) - 1
    return found
