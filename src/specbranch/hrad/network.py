"""H-RAD at run time: a small trained network that predicts from target features how much of a window is accepted.

It needs NumPy only; `hrad/training.py` trains it. A trained predictor is a directory with `hrad.safetensors` and
`card.json`, and only this file knows their format.

The input for a sequence: the hidden states of the target's last K layers at the position that predicted the newest
token, oldest layer first and the last one after the final norm (`hidden_states[-K:]` in Transformers), then the
target's input embedding of the newest token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from specbranch.core.round import MAX_WINDOW, AcceptanceHint, Signal
from specbranch.errors import SpecBranchError

FORMAT = "specbranch-hrad"
VERSION = 1
WEIGHTS, CARD = "hrad.safetensors", "card.json"
_NUM_SIGNALS = len(Signal)

_Array = np.ndarray[Any, np.dtype[np.float32]]
_Positive = Annotated[int, Meta(ge=1)]


class HradError(SpecBranchError, ValueError):
    """A trained predictor cannot be read, its files do not agree, or its input has the wrong form."""


class HradCard(msgspec.Struct, frozen=True):
    """The metadata of a predictor: the pair of models, the input and the window for which it was trained.

    It was trained on `positions` examples, by the code of `commit`.
    """

    format: str
    version: int
    target: str
    draft: str
    num_layers: _Positive  # K
    hidden_len: _Positive  # of the target
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
    tasks: list[str]
    positions: int
    commit: str | None

    @property
    def d_in(self) -> int:
        """Length of the input of one sequence: K hidden states and one embedding."""
        return (self.num_layers + 1) * self.hidden_len


class Hrad:
    """The trained network, which predicts from the target's features whether none, some or all of a window is accepted.

    It has two hidden layers and an output head. A second head, for the probabilities that 1, 2, 3 ... tokens are
    accepted, helps training; only evaluation reads it.
    """

    def __init__(self, tensors: Mapping[str, _Array], card: HradCard) -> None:
        self.card = card
        _check_shapes(tensors, card)
        # Copies: memory mapped from a file may be unaligned, and then every product would copy it first.
        self.tensors = {name: np.array(tensor, order="C") for name, tensor in tensors.items()}

    @property
    def d_in(self) -> int:
        """Length of the input of one sequence."""
        return self.card.d_in

    def predict(
        self, features: _Array, product: Callable[[_Array, _Array], _Array] = np.matmul
    ) -> list[AcceptanceHint]:
        """Predict for each of n sequences how much of its window will be accepted; `features` is [n, d_in] float32.

        `product` multiplies matrices; a process that limits its threads can pass a function of its own. Raise
        `HradError` if the features have another shape, or are not finite.
        """
        if features.ndim != 2 or features.shape[1] != self.d_in:
            raise HradError(f"features of shape {list(features.shape)}; the predictor takes [n, {self.d_in}]")
        with np.errstate(all="ignore"):  # the next check finds values that are not finite
            classes = class_logits(self.tensors, features, product)
        if not np.isfinite(classes).all():
            raise HradError("the target's features are not finite numbers, or too large for the predictor")
        return [AcceptanceHint(Signal(int(signal))) for signal in classes.argmax(axis=1)]


def class_logits(
    tensors: Mapping[str, _Array], inputs: _Array, product: Callable[[_Array, _Array], _Array] = np.matmul
) -> _Array:
    """Return the logits of the three signals (none, some, all), [n, 3], for `inputs` [n, d_in].

    `product` multiplies matrices.
    """
    return product(_hidden(tensors, inputs, product), tensors["w_class"]) + tensors["b_class"]


def survival(tensors: Mapping[str, _Array], inputs: _Array) -> _Array:
    """Return the probabilities [n, window] that at least 1, 2, ... tokens are accepted. No planner uses them."""
    chances = _hidden(tensors, inputs, np.matmul) @ tensors["w_survival"] + tensors["b_survival"]
    return np.cumprod(0.5 + 0.5 * np.tanh(0.5 * chances), axis=1)  # sigmoids, without overflow


def _hidden(tensors: Mapping[str, _Array], inputs: _Array, product: Callable[[_Array, _Array], _Array]) -> _Array:
    hidden = (inputs - tensors["mean"]) * tensors["scale"]
    for layer in "01":
        hidden = np.maximum(product(hidden, tensors[f"w{layer}"]) + tensors[f"b{layer}"], 0.0)
    return hidden


def read_hrad_card(directory: Path) -> HradCard:
    """Read and return the card (the metadata file) of the predictor in `directory`.

    Raise `HradError`, which says what to do, if the card is missing or invalid.
    """
    try:
        card = msgspec.json.decode((directory / CARD).read_bytes(), type=HradCard)
    except OSError as error:
        raise HradError(f"{error.filename}: {error.strerror}; give the directory of a trained predictor") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HradError(f"{directory / CARD} is not a predictor's card ({error}); train it again") from error
    if (card.format, card.version) != (FORMAT, VERSION):
        raise HradError(
            f"{directory / CARD} is {card.format} version {card.version}; this reads {FORMAT} version {VERSION}: "
            "train the predictor again with this release"
        )
    return card


def read_hrad(directory: Path) -> Hrad:
    """Read and return the trained predictor in a directory; raise `HradError`, which says what to do, on failure."""
    card = read_hrad_card(directory)
    try:
        return Hrad(_read_tensors(directory / WEIGHTS), card)
    except HradError as error:
        raise HradError(f"{directory / WEIGHTS}: {error}") from error


def write_hrad(directory: Path, tensors: Mapping[str, _Array], card: Mapping[str, Any]) -> None:
    """Write a predictor to a directory, with `format` and `version` added to its card; raise `HradError` if invalid."""
    document = {"format": FORMAT, "version": VERSION, **card}
    try:
        _check_shapes(tensors, msgspec.convert(document, HradCard))
    except msgspec.ValidationError as error:
        raise HradError(f"the card of a predictor is wrong: {error}") from error
    save = _safetensors("save_file")
    directory.mkdir(parents=True, exist_ok=True)
    save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / WEIGHTS)
    (directory / CARD).write_text(json.dumps(document, indent=2) + "\n")


def _check_shapes(tensors: Mapping[str, _Array], card: HradCard) -> None:
    """Raise `HradError` if the tensors do not fit the card; hidden layers may have any length."""
    h0, h1 = (tensors[name].shape[-1] if name in tensors and tensors[name].ndim else 0 for name in ("b0", "b1"))
    shapes = {
        "mean": (card.d_in,),
        "scale": (card.d_in,),
        "w0": (card.d_in, h0),
        "b0": (h0,),
        "w1": (h0, h1),
        "b1": (h1,),
        "w_class": (h1, _NUM_SIGNALS),
        "b_class": (_NUM_SIGNALS,),
        "w_survival": (h1, card.window),
        "b_survival": (card.window,),
    }
    if set(tensors) != set(shapes):
        odd = ", ".join(sorted(set(tensors) ^ set(shapes)))
        raise HradError(f"tensors are missing or not known ({odd}); train the predictor again with this release")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype != np.float32 or tensor.shape != shape or 0 in shape:
            raise HradError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, but the card says float32 {list(shape)}; "
                "train the predictor again"
            )


def _read_tensors(path: Path) -> dict[str, _Array]:
    load = _safetensors("load_file")
    try:
        tensors: dict[str, _Array] = load(path)
    except FileNotFoundError as error:
        raise HradError("no such file; give the directory of a trained predictor") from error
    except Exception as error:  # safetensors has an error class for each fault of a file
        raise HradError(f"cannot be read ({error}); train the predictor again") from error
    return tensors


def _safetensors(name: str) -> Any:
    try:
        from safetensors import numpy
    except ImportError as error:
        raise HradError(
            "a trained predictor needs safetensors, which comes with vLLM: pip install safetensors"
        ) from error
    return getattr(numpy, name)
