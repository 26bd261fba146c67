"""Fitting: it finds what there is to find, says so when there is nothing, and the file gives the same chances."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from specbranch.hrad.examples import Examples, ExamplesCard, ExamplesError
from specbranch.hrad.network import read_hrad, write_hrad
from specbranch.hrad.training import FitOptions, Network, evaluate, fit, majority, score

CARD = ExamplesCard("big", "small", 2, 8, 0.0, ("code",))
OPTIONS = FitOptions(window=3, hidden=(32, 16), epochs=12, batch=64)


def examples(count: int, seed: int, is_telling: bool) -> Examples:
    """Runs 0 to 4; if the features tell anything, one of them is the run, among noise and on an odd scale."""
    rng = np.random.default_rng(seed)
    runs = rng.integers(0, 5, count).astype(np.int32)
    features = rng.normal(5, 40, (count, 24))
    if is_telling:
        features[:, 7] = 100 + 3 * runs + rng.normal(0, 0.3, count)
    distributions = np.stack([rng.uniform(0.1, 0.9, count), rng.uniform(0, 0.1, count), rng.uniform(0, 3, count)], -1)
    return Examples(
        CARD,
        features.astype(np.float16),
        distributions.astype(np.float32),
        runs,
        np.full(count, 9, dtype=np.int32),
        np.zeros(count, dtype=np.int32),
        np.arange(count, dtype=np.int64),
    )


def fitted(is_telling: bool) -> Network:
    return fit(
        examples(2000, 0, is_telling), examples(500, 1, is_telling), "features", OPTIONS, lambda epoch, most, loss: None
    )


def test_without_a_rank_it_learns_from_all_numbers_and_without_patience_for_all_epochs() -> None:
    options = replace(OPTIONS, rank=None, patience=None)
    train, held_out, test = (examples(count, seed, is_telling=True) for seed, count in enumerate((2000, 500, 500)))

    network = fit(train, held_out, "features", options, lambda epoch, most, loss: None)

    assert network.epochs == options.epochs
    assert network.tensors["w0"].shape == (24, 32)
    assert score(network.foresee(test)[0], test.classes(3)).accuracy > 0.95


def test_it_finds_what_the_features_tell() -> None:
    network = fitted(is_telling=True)
    test = examples(500, 2, True)

    chances, survival = network.foresee(test)

    assert score(chances, test.classes(3)).accuracy > 0.95
    assert np.all(np.diff(survival, axis=-1) <= 0)
    for depth in range(3):
        stands = test.runs > depth
        assert survival[stands, depth].mean() > 0.85
        assert survival[~stands, depth].mean() < 0.4


def test_noise_is_not_foreseen_better_than_by_the_shares_alone() -> None:
    network = fitted(is_telling=False)
    test = examples(500, 2, False)

    one = score(network.foresee(test)[0], test.classes(3))

    base = majority(examples(2000, 0, False).classes(3), test.classes(3))
    assert one.log_loss > base.log_loss - 0.02
    assert one.log_loss < base.log_loss + 0.15, "it stopped before it had learned the noise by heart"
    assert network.epochs < OPTIONS.epochs


def test_few_directions_keep_many_inputs_from_being_learned_by_heart() -> None:
    rng = np.random.default_rng(0)
    into = rng.normal(0, 1, (2, 400))

    def spread_out(count: int) -> Examples:
        """Two numbers that tell the run, seen only through four hundred noisy ones."""
        base = examples(count, int(rng.integers(1 << 30)), False)
        latent = rng.normal(0, 1, (count, 2))
        features = latent @ into + rng.normal(0, 3, (count, 400))
        runs = np.digitize(latent[:, 0] + rng.normal(0, 0.5, count), (-1.0, -0.3, 0.3, 1.0))
        return replace(base, features=features.astype(np.float16), runs=runs.astype(np.int32))

    train, held_out, test = spread_out(300), spread_out(200), spread_out(2000)
    networks = {
        rank: fit(train, held_out, "both", replace(OPTIONS, rank=rank), lambda epoch, most, loss: None)
        for rank in (4, 400)
    }

    few, all_of_them = (score(networks[rank].foresee(test)[0], test.classes(3)).log_loss for rank in (4, 400))
    assert few < all_of_them - 0.05
    assert networks[4].tensors["w0"].shape == (403, 32), "what runs in vLLM is the same network"


def test_the_file_gives_the_same_chances(tmp_path: Path) -> None:
    network = fitted(is_telling=True)
    card = {
        "format": "specbranch-hrad",
        "version": 1,
        "target": "big",
        "draft": "small",
        "num_layers": 2,
        "hidden_len": 8,
        "window": 3,
        "tasks": ["code"],
        "positions": 2000,
        "commit": None,
    }
    write_hrad(tmp_path, network.tensors, card)
    test = examples(50, 3, True)

    hints = read_hrad(tmp_path).predict(test.features.astype(np.float32))

    chances, _ = network.foresee(test)
    assert [int(hint.signal) for hint in hints] == chances.argmax(-1).tolist()
    assert json.loads((tmp_path / "card.json").read_text())["target"] == "big"


def test_every_input_is_scored_on_prompts_it_has_not_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told: list[str] = []
    found = evaluate(examples(1500, 0, True), OPTIONS, True, lambda stage, done, most: told.append(stage))
    found.write(tmp_path / "out")
    document = json.loads((tmp_path / "out" / "scores.json").read_text())

    assert set(found.scores) == {"majority", "features", "confidence", "both"}
    assert found.scores["features"].accuracy > found.scores["majority"].accuracy
    assert document == json.loads(json.dumps(found.as_json()))
    assert sum(document["positions"].values()) == 1500
    assert set(document["across"]) == {"code"}
    assert set(told) == {f"fitting on {name}" for name in ("features", "confidence", "both", "code")}
    assert read_hrad(tmp_path / "out") is not None


def test_a_split_without_prompts_says_what_to_do() -> None:
    one_prompt = replace(examples(20, 0, True), prompts=np.zeros(20, dtype=np.int64))

    with pytest.raises(ExamplesError, match="collect more prompts"):
        evaluate(one_prompt, OPTIONS, False, lambda stage, done, most: None)


TRUTH = np.array([0, 0, 1, 2])


def test_scores_of_a_small_case() -> None:
    chances = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])

    one = score(chances, TRUTH)

    assert one.accuracy == 0.75
    assert one.confusion == ((1, 1, 0), (0, 1, 0), (0, 0, 1))
    assert one.macro_f1 == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert one.log_loss == pytest.approx(-np.log([0.8, 0.1, 0.8, 0.4]).mean())
    # three positions at 0.8, two of them right, and one at 0.4 that is right
    assert one.calibration_error == pytest.approx((3 * (0.8 - 2 / 3) + 0.6) / 4)
    assert one.positions == 4


def test_the_majority_foresees_the_class_that_comes_most_often() -> None:
    one = majority(np.array([0, 0, 0, 1]), TRUTH)

    assert one.accuracy == 0.5
    assert one.macro_f1 == pytest.approx((2 * 2 / 6) / 3)
