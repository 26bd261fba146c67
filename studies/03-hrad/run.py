#!/usr/bin/env python3
"""What H-RAD is worth: trained on 1, 2, 4 and 8 layers, as in the paper and by cost, and replayed on unseen prompts.

studies/03-hrad/run.py COLLECTION...      # directories of `specbranch train collect --layers 8`; writes result.json

Networks learn from the training prompts. The held-out prompts stop their training, and choose all thresholds by the
speed of a replay: of H-RAD, of the draft's confidence alone and of the oracle alike. The test prompts judge: speeds and
gains have ranges by bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.costs import PairModel
from specbranch.core.round import Signal
from specbranch.hrad.examples import SPLITS, Array, Examples, read_answers, read_examples, split_of
from specbranch.hrad.training import FitOptions, Inputs, Network, fit, majority, score
from specbranch.machine import provenance
from specbranch.simulation.presets import PAIRS
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Answer, Header, Trace

HERE = Path(__file__).resolve().parent
WINDOW = 8  # gamma is the same
LAYERS = (1, 2, 4, 8)
PAPER_LAYERS = 4
LAYOUT = Layout(8.0, PAIRS["vicuna-68m-13b"].row_cost)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"wait_for_draft": True, "cost_aware": False, "max_branches": 12},
    "served": {},
}
CONFIDENCES = (0.2, 0.35, 0.5, 0.65)
CHANCES = (0.45, 0.6, 0.8, 1.1)  # at 1.1 the signal is never given
NUM_REPLAYED = {"held-out": 16, "test": 72}  # prompts at most, evenly over the collections
SHARES = (1 / 16, 1 / 4, 1.0)  # of the training prompts, for the learning curve
RESAMPLES = 2000
LEAST_CHANCE = 1e-4

_answers: dict[str, list[Answer]] = {}  # by split; set before the processes of the pool start, which inherit it


@dataclass(frozen=True)
class Training:
    """How a network learns, and whether thresholds on its chances replace the likeliest class."""

    inputs: Inputs
    options: FitOptions
    has_thresholds: bool


TRAININGS = {
    # As published: cross-entropy on all numbers of the features, and the likeliest class. Batches are larger, and it
    # stops when the held-out prompts get worse, which comes long before the paper's 20 epochs.
    "as in the paper": Training("features", FitOptions(WINDOW, rank=None, patience=2), False),
    "by cost": Training("features", FitOptions(WINDOW), True),
    "by cost, with the draft's next distribution": Training("both", FitOptions(WINDOW), True),
}


@dataclass(frozen=True)
class Job:
    """One replay of the answers of a split; `signals` has for each answer what H-RAD predicts after each token."""

    split: str
    method: Method
    signals: tuple[tuple[int, ...], ...] = ()


def replayed(job: Job) -> Array:
    """Return for each answer: the time of plain decoding, the simulated time, and the rejected and emitted tokens."""
    costs, rows = PairModel(), []
    answers = _answers[job.split]
    for answer, signals in zip(answers, job.signals or [()] * len(answers), strict=True):
        trace = Trace(Header(target="target", draft="draft"), (replace(answer, foreseen=signals),))
        found = simulate(trace, job.method, LAYOUT, costs=costs)
        rows.append((found.speedup * found.elapsed_s, found.elapsed_s, found.stats.rejected, found.stats.emitted))
    return np.array(rows)


def speed_of(rows: Array) -> float:
    return float(rows[:, 0].sum() / rows[:, 1].sum())


def method_of(form: str, confidence: float, predictor: str) -> Method:
    return Method("specbranch", {"gamma": WINDOW, "confidence": confidence, **FORMS[form]}, predictor)


@dataclass(frozen=True)
class Chances:
    """A network's class probabilities [tokens, 3] for each answer of a split."""

    by_answer: tuple[Array, ...]

    def signals(self, least_none: float, least_all: float) -> tuple[tuple[int, ...], ...]:
        """Return the signals of each answer: "none" and "all" from these probabilities on, else "some"."""
        found = []
        for chances in self.by_answer:
            given = np.full(len(chances), int(Signal.SOME))
            given[chances[:, 2] >= least_all] = int(Signal.ALL)
            given[chances[:, 0] >= least_none] = int(Signal.NONE)
            found.append((*given.tolist(), int(Signal.SOME)))
        return tuple(found)

    def likeliest(self) -> tuple[tuple[int, ...], ...]:
        return tuple((*chances.argmax(-1).tolist(), int(Signal.SOME)) for chances in self.by_answer)


class Data:
    """The examples of all collections, by split, and the answers that they come from, in the same order."""

    def __init__(self, collections: Sequence[Path]) -> None:
        self.all = read_examples(collections)
        answers = [found for directory in collections for found in read_answers(directory)]
        starts = np.cumsum([0, *(len(answer.tokens) - 1 for _, _, answer in answers)])
        self.answers: dict[str, list[Answer]] = {}
        self.rows: dict[str, list[slice]] = {}
        for split, most in NUM_REPLAYED.items():
            own = [index for index, (_, prompt, _) in enumerate(answers) if split_of(prompt) == split]
            chosen = own[:: max(1, len(own) // most)][:most]
            self.answers[split] = [replace(answers[index][2], prompt=()) for index in chosen]
            self.rows[split] = [slice(starts[index], starts[index + 1]) for index in chosen]

    def examples(self, split: str, num_layers: int) -> Examples:
        """Return the examples of a split for which it is known how much of a window was accepted."""
        return self.all.with_last_layers(num_layers).split(split).settled(WINDOW)

    def chances(self, split: str, network: Network, num_layers: int) -> Chances:
        """Return what a network says of every token of the answers."""
        examples = self.all.with_last_layers(num_layers)
        return Chances(tuple(network.foresee(examples.take(rows))[0] for rows in self.rows[split]))


class Replays:
    """Replays in two processes; what was chosen and measured for each form of the planner."""

    def __init__(self, pool: ProcessPoolExecutor, seed: int = 0) -> None:
        self._pool = pool
        self._seed = seed

    def best(self, jobs: Sequence[Job]) -> int:
        """Return the index of the fastest job."""
        return int(np.argmax([speed_of(rows) for rows in self._pool.map(replayed, jobs)]))

    def tuned_confidence(self, form: str, predictor: str) -> float:
        """Return the threshold with which a predictor is fastest on the held-out prompts."""
        jobs = [Job("held-out", method_of(form, confidence, predictor)) for confidence in CONFIDENCES]
        return CONFIDENCES[self.best(jobs)]

    def tuned(self, form: str, chances: Chances, confidence: float) -> dict[str, float]:
        """Return H-RAD's two thresholds and the draft's, chosen one after the other on the held-out prompts."""
        found = {"least_none": 1.1, "least_all": 1.1, "confidence": confidence}
        for name, values in (("least_none", CHANCES), ("least_all", CHANCES), ("confidence", CONFIDENCES)):
            tries = [{**found, name: value} for value in values]
            jobs = [
                Job(
                    "held-out",
                    method_of(form, one["confidence"], "hrad"),
                    chances.signals(one["least_none"], one["least_all"]),
                )
                for one in tries
            ]
            found = tries[self.best(jobs)]
        return found

    def measure(self, form: str, jobs: Mapping[str, Job], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Replay the test prompts; return for each method speed, gain, share of the oracle's gain, each with a range."""
        found = dict(zip(jobs, self._pool.map(replayed, jobs.values()), strict=True))
        count = len(_answers["test"])
        drawn = np.random.default_rng(self._seed).integers(count, size=(RESAMPLES, count))

        def speeds(rows: Array) -> Array:
            """Return the speed on all prompts, then that of each resample."""
            sums = rows[drawn].sum(axis=1)
            return np.concatenate([[speed_of(rows)], sums[:, 0] / sums[:, 1]])

        base, oracle = speeds(found["confidence"]), speeds(found["oracle"])
        table = []
        for name, rows in found.items():
            own = speeds(rows)
            row: dict[str, Any] = {"form": form, "method": name, **settings.get(name, {})}
            row |= {"rejected": round(float(rows[:, 2].sum() / rows[:, 3].sum()), 3)}
            for key, values in (
                ("speed", own),
                ("over_confidence", own / base),
                ("share_of_oracle", (own - base) / (oracle - base)),
            ):
                low, high = np.percentile(values[1:], [2.5, 97.5])
                row[key] = [round(float(value), 3) for value in (values[0], low, high)]
            table.append(row)
            print(row, flush=True)
        return table


def trained(data: Data, num_layers: int, training: Training, share: float = 1.0) -> tuple[Network, dict[str, Any]]:
    """Train a network on a share of the training prompts; return it with its scores on the test prompts."""
    examples = data.examples("train", num_layers)
    if share < 1:
        names = np.unique(examples.prompts)
        chosen = np.random.default_rng(0).permutation(names)[: max(1, round(share * len(names)))]
        examples = examples.take(np.isin(examples.prompts, chosen))
    held_out, test = (data.examples(split, num_layers) for split in ("held-out", "test"))
    network = fit(examples, held_out, training.inputs, training.options, lambda *_: None)
    scores = score(network.foresee(test)[0], test.classes(WINDOW)).as_json()
    kept = ("accuracy", "macro_f1", "log_loss", "confusion")
    row = {"layers": num_layers, "inputs": training.inputs, "positions": len(examples), "epochs": network.epochs}
    return network, row | {name: scores[name] for name in kept}


def by_token(data: Data, network: Network, num_layers: int) -> list[dict[str, Any]]:
    """Return for each token of the window the log loss of whether it is accepted, if those before it are.

    It is predicted by a logistic line over the log-odds of the draft's distribution at its place, over H-RAD's, and
    over both. The lines learn from the held-out prompts.
    """
    examples = data.all.with_last_layers(num_layers)
    chances = network.foresee(examples)[1].clip(LEAST_CHANCE, 1)
    before = np.concatenate([np.ones((len(chances), 1)), chances[:, :-1]], axis=1)
    predicted, said = log_odds(chances / before), log_odds(examples.distributions[:, 0])
    split = {name: split_of(int(name)) for name in np.unique(examples.prompts)}
    splits = np.array([split[name] for name in examples.prompts])
    table = []
    for ahead in range(WINDOW):
        at = np.flatnonzero((examples.runs >= ahead) & (examples.left > ahead))
        is_accepted = examples.runs[at] > ahead
        # The distribution of the token so far ahead is as many rows further.
        seen = np.stack([said[at + ahead], predicted[at, ahead]], axis=-1)
        learned, judged = (splits[at] == name for name in ("held-out", "test"))
        row: dict[str, Any] = {"ahead": ahead, "positions": int(judged.sum())}
        for name, columns in (("distribution", [0]), ("hrad", [1]), ("both", [0, 1])):
            inputs = seen[:, columns]
            row[name] = round(line_loss(inputs[learned], is_accepted[learned], inputs[judged], is_accepted[judged]), 4)
        table.append(row)
    return table


def log_odds(chances: Array) -> Array:
    chances = np.clip(chances, LEAST_CHANCE, 1 - LEAST_CHANCE)
    odds: Array = np.log(chances / (1 - chances))
    return odds


def line_loss(inputs: Array, truth: Array, asked: Array, answers: Array) -> float:
    """Return the log loss on what is asked of a logistic line that was learned from the inputs."""
    import torch

    line = torch.nn.Linear(inputs.shape[1], 1)
    optimiser = torch.optim.LBFGS(line.parameters(), max_iter=100)

    def loss_of(x: Array, y: Array) -> torch.Tensor:
        logits = line(torch.from_numpy(x).float())[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(y).float())

    def closure() -> float:
        optimiser.zero_grad()
        loss = loss_of(inputs, truth)
        loss.backward()
        return float(loss)

    optimiser.step(closure)
    with torch.inference_mode():
        return float(loss_of(asked, answers))


def measure(data: Data, replays: Replays) -> dict[str, Any]:
    """Train all networks and replay them; return the sections of the result."""
    scores, curve, table, tokens = [], [], [], []
    jobs: dict[str, dict[str, Job]] = {form: {} for form in FORMS}
    settings: dict[str, dict[str, Any]] = {form: {} for form in FORMS}
    confidences = {}
    for form in FORMS:
        for predictor in ("confidence", "oracle", "all"):
            confidence = replays.tuned_confidence(form, predictor)
            jobs[form][predictor] = Job("test", method_of(form, confidence, predictor))
            settings[form][predictor] = {"confidence": confidence}
            confidences[form, predictor] = confidence
    for num_layers in LAYERS:
        for label, training in TRAININGS.items():
            if training.inputs == "both" and num_layers != PAPER_LAYERS:
                continue
            network, row = trained(data, num_layers, training)
            scores.append({"training": label, **row})
            print(scores[-1], flush=True)
            if num_layers == PAPER_LAYERS and label == "by cost":
                tokens = by_token(data, network, num_layers)
            held_out, test = (data.chances(split, network, num_layers) for split in ("held-out", "test"))
            for form in FORMS:
                found = {"confidence": confidences[form, "confidence"]}
                if training.has_thresholds:
                    found = replays.tuned(form, held_out, found["confidence"])
                    signals = test.signals(found["least_none"], found["least_all"])
                else:
                    signals = test.likeliest()
                name = f"{num_layers} layers, {label}"
                jobs[form][name] = Job("test", method_of(form, found["confidence"], "hrad"), signals)
                settings[form][name] = {"layers": num_layers, "training": label, **found}
    for form in FORMS:
        table += replays.measure(form, jobs[form], settings[form])
    for share in SHARES:
        curve.append(trained(data, PAPER_LAYERS, TRAININGS["by cost"], share)[1])
        print(curve[-1], flush=True)
    return {"scores": scores, "replay": table, "curve": curve, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    data = Data(args.collections)
    _answers.update(data.answers)
    splits = {name: data.examples(name, 1) for name in SPLITS}
    card = data.all.card
    document: dict[str, Any] = {
        "pair": {"target": card.target, "draft": card.draft, "dtype": card.dtype, "tasks": card.tasks},
        "positions": {"all": len(data.all)} | {name: len(part) for name, part in splits.items()},
        "prompts": {name: len(np.unique(part.prompts)) for name, part in splits.items()},
        "replayed": {name: len(answers) for name, answers in data.answers.items()},
        "classes": (splits["test"].classes(WINDOW)[:, None] == range(3)).mean(0).round(4).tolist(),
        "majority": majority(splits["train"].classes(WINDOW), splits["test"].classes(WINDOW)).log_loss,
    }
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(len, [()] * 2))  # the processes start before torch has threads
        document |= measure(data, Replays(pool))
    document["provenance"] = provenance()
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
