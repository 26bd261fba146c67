"""The trained network at run time: what it computes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="trained predictors are stored with safetensors")

from specbranch.core.costs import PairModel
from specbranch.core.ngram import NgramDrafter
from specbranch.core.node import GreedyPicker
from specbranch.core.planners.predictors import HintPredictor
from specbranch.core.round import AcceptanceHint, Round, Signal
from specbranch.core.tree import Tree
from specbranch.hrad.network import Hrad, HradCard, HradError, read_hrad, survival, write_hrad

CARD: dict[str, Any] = {
    "target": "large",
    "draft": "small",
    "num_layers": 1,
    "hidden_len": 1,
    "window": 2,
    "tasks": ["code"],
    "positions": 1000,
    "commit": "abc",
}
Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def small_tensors() -> Tensors:
    """Two features, two and one hidden units, a window of two."""
    values: dict[str, list[Any]] = {
        "mean": [1, 0],
        "scale": [2, 1],
        "w0": [[1, -1], [0, 1]],
        "b0": [0, -2],
        "w1": [[0.5], [9]],
        "b1": [1],
        "w_class": [[1, 0, -1]],
        "b_class": [0, 1, 5],
        "w_survival": [[0.5, -0.5]],
        "b_survival": [0, 1],
    }
    return {name: np.array(value, dtype=np.float32) for name, value in values.items()}


def features(*rows: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(rows, dtype=np.float32)


def test_the_network_computes_what_a_pencil_does(tmp_path: Path) -> None:
    """[2, 3] is scaled to [2, 3], gives [2, 0] and then 2; [5, 1] is scaled to [8, 1], gives [8, 0] and then 5."""
    write_hrad(tmp_path / "new", small_tensors(), CARD)
    hrad = read_hrad(tmp_path / "new")
    one, other = hrad.predict(features([2, 3], [5, 1]))

    # Classes [2, 1, 3] and [5, 1, 0]; sigmoids of [1, 0] and of [2.5, -1.5].
    assert (one.signal, other.signal) == (Signal.ALL, Signal.NONE)
    chances = survival(hrad.tensors, features([2, 3], [5, 1]))
    assert chances[0] == pytest.approx((0.731059, 0.731059 * 0.5), abs=1e-6)
    assert chances[1] == pytest.approx((0.924142, 0.924142 * 0.182426), abs=1e-6)
    assert hrad.d_in == 2
    assert hrad.card == HradCard("specbranch-hrad", 1, **CARD)


def test_survival_never_rises_and_stays_between_0_and_1() -> None:
    rng = np.random.default_rng(5)
    tensors = {name: np.asarray(rng.normal(0, 30, old.shape), np.float32) for name, old in small_tensors().items()}
    for first, second in survival(tensors, rng.normal(0, 9, (200, 2)).astype(np.float32)):
        assert 1 >= first >= second >= 0


def test_no_texts_have_no_outlooks() -> None:
    assert Hrad(small_tensors(), HradCard("", 1, **CARD)).predict(np.empty((0, 2), dtype=np.float32)) == []


@pytest.mark.parametrize("row", [[np.nan, 0], [np.inf, 0], [3e38, 0]])
def test_features_that_are_no_numbers_are_refused(row: list[float]) -> None:
    """They would be refused on the wire, and the whole step with them."""
    with pytest.raises(HradError, match="not finite"):
        Hrad(small_tensors(), HradCard("", 1, **CARD)).predict(features([2, 3], row))


def test_features_of_another_length_are_refused() -> None:
    with pytest.raises(HradError, match=r"shape \[1, 3\]; the predictor takes \[n, 2\]"):
        Hrad(small_tensors(), HradCard("", 1, **CARD)).predict(features([1, 2, 3]))


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def shaped(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("w1"), r"missing or not known \(w1\)"),
        (shaped("w2", 1), r"missing or not known \(w2\)"),
        (shaped("mean", 3), r"mean is float32 \[3\], but the card says float32 \[2\]"),
        (shaped("w_survival", 1, 5), r"but the card says float32 \[1, 2\]"),
        (shaped("w_class", 1, 4), r"but the card says float32 \[1, 3\]"),
        (shaped("b0", 7), r"w0 is float32 \[2, 2\]"),
        (shaped("b0"), "w0 is"),
        (lambda tensors: tensors.__setitem__("b1", np.zeros(1)), "b1 is float64"),
    ],
)
def test_tensors_that_do_not_fit_the_card_are_refused(change: Callable[[Tensors], None], message: str) -> None:
    tensors = small_tensors()
    change(tensors)

    with pytest.raises(HradError, match=message):
        Hrad(tensors, HradCard("", 1, **CARD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is other version 1; this reads specbranch-hrad version 1"),
        ({"version": 2}, "version 2; this reads"),
        ({"window": 65}, "not a predictor's card"),
        ({"num_layers": 0}, "not a predictor's card"),
        ({"hidden_len": "long"}, "not a predictor's card"),
        ({"hidden_len": 2}, r"hrad.safetensors: tensor mean is float32 \[2\], but the card says float32 \[4\]"),
    ],
)
def test_a_card_of_another_kind_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_hrad(tmp_path, small_tensors(), CARD)
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps({**card, **change}))

    with pytest.raises(HradError, match=message):
        read_hrad(tmp_path)


@pytest.mark.parametrize("name", ["card.json", "hrad.safetensors"])
def test_a_missing_or_broken_file_is_named(name: str, tmp_path: Path) -> None:
    write_hrad(tmp_path, small_tensors(), CARD)
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(HradError, match=rf"{name}.* train"):
        read_hrad(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(HradError, match=rf"{name}: .*[Nn]o such file.*; give the directory of a trained predictor"):
        read_hrad(tmp_path)


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(HradError, match="card of a predictor is wrong"):
        write_hrad(tmp_path / "one", small_tensors(), {**CARD, "window": 0})
    with pytest.raises(HradError, match="the card says"):
        write_hrad(tmp_path / "two", small_tensors(), {**CARD, "window": 3})

    assert list(tmp_path.iterdir()) == []


def test_the_told_predictor_repeats_the_outlook_and_leaves_the_rest_to_confidence() -> None:
    begun = Round(
        0, Tree([1], GreedyPicker(), PairModel().calibration), PairModel(), NgramDrafter([1], PairModel().history)
    )
    assert HintPredictor().predict(begun) == Signal.SOME

    for signal in Signal:
        begun.hint = AcceptanceHint(signal)
        assert HintPredictor().predict(begun) == signal
