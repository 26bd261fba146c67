"""Examples: labels by hand, splits by prompt, files that are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specbranch.core.distribution import Distribution
from specbranch.hrad.examples import (
    SPLITS,
    Examples,
    ExamplesCard,
    ExamplesError,
    name_of,
    positions,
    read_examples,
    read_examples_card,
    split_of,
    write_examples_card,
    write_part,
)
from specbranch.trace import Answer

CARD = ExamplesCard("big", "small", 2, 4, 0.0, ("code", "chat"))


def distribution(first: int, confidence: float = 0.5) -> Distribution:
    return Distribution((first, first + 1), (confidence, 0.25), 1.5)


def arrays(runs: list[int], left: list[int], prompts: list[int]) -> dict[str, np.ndarray]:
    count = len(runs)
    return {
        "features": np.arange(count * 12, dtype=np.float16).reshape(count, 12),
        "distributions": np.full((count, 3), 0.5, dtype=np.float32),
        "runs": np.array(runs, dtype=np.int32),
        "left": np.array(left, dtype=np.int32),
        "tasks": np.array([prompt % 2 for prompt in prompts], dtype=np.int32),
        "prompts": np.array(prompts, dtype=np.int64),
    }


def test_a_run_counts_first_choices_that_are_right_behind_the_place() -> None:
    """The target says 1 2 3 4 5; the draft would have said 1 2 9 4 5."""
    answer = Answer(
        (1, 2, 3, 4, 5), (distribution(1), distribution(2), distribution(9, 0.125), distribution(4), distribution(5))
    )

    distributions, runs, left = positions(answer)

    assert runs.tolist() == [1, 0, 2, 1]
    assert left.tolist() == [4, 3, 2, 1]
    assert distributions[1].tolist() == [0.125, 0.25, 1.5], "the distribution behind the second token"


def test_positions_whose_window_nobody_saw_are_left_out() -> None:
    examples = Examples(CARD, **arrays([2, 1, 0, 3], [2, 2, 1, 9], [0, 0, 1, 1]))

    assert examples.settled(3).runs.tolist() == [1, 0, 3]
    assert examples.settled(2).runs.tolist() == [2, 1, 0, 3]
    assert examples.classes(3).tolist() == [1, 1, 0, 2]
    assert examples.of_task("chat").runs.tolist() == [0, 3]


def test_a_prompt_is_in_one_split_and_every_split_gets_some() -> None:
    names = [name_of(f"prompt {index}") for index in range(400)]
    shares = [sum(split_of(name) == split for name in names) / len(names) for split in SPLITS]

    assert sum(shares) == 1
    assert shares == pytest.approx([0.625, 0.125, 0.25], abs=0.06)
    examples = Examples(CARD, **arrays([0] * 400, [1] * 400, names))
    parts = [set(examples.split(split).prompts.tolist()) for split in SPLITS]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]


def test_the_last_layers_are_kept_with_the_embedding() -> None:
    """Two layers and an embedding of four numbers each."""
    examples = Examples(CARD, **arrays([1, 2], [3, 3], [7, 7]))

    fewer = examples.with_last_layers(1)

    assert fewer.features.tolist() == examples.features[:, 4:].tolist() and fewer.card.num_layers == 1
    assert examples.with_last_layers(2).features.tolist() == examples.features.tolist()
    with pytest.raises(ExamplesError, match="which have 2"):
        examples.with_last_layers(3)


def test_parts_are_read_back_together(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    write_examples_card(tmp_path, CARD)
    write_part(tmp_path, 0, arrays([1, 2], [3, 3], [7, 7]))
    write_part(tmp_path, 1, arrays([4], [5], [8]))

    examples = read_examples([tmp_path])

    assert examples.card == CARD and examples.runs.tolist() == [1, 2, 4] and examples.prompts.tolist() == [7, 7, 8]


def test_what_is_no_collection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExamplesError, match="train collect"):
        read_examples_card(tmp_path)
    (tmp_path / "card.json").write_text('{"format": "other", "version": 1}')
    with pytest.raises(ExamplesError, match="anew"):
        read_examples_card(tmp_path)


def test_collections_of_different_pairs_do_not_mix(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    for name, card in (("a", CARD), ("b", ExamplesCard("other", "small", 2, 4, 1.0, CARD.tasks))):
        (tmp_path / name).mkdir()
        write_examples_card(tmp_path / name, card)
    with pytest.raises(ExamplesError, match="another pair"):
        read_examples([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ExamplesError, match="no finished part"):
        read_examples([tmp_path / "a"])
