"""Convert a dense checkpoint to W8A8: 8-bit weights for vLLM's int8 kernels, which quantize activations themselves.

Weights are rounded to the nearest integer, symmetric, with one scale per output channel; no data is needed. The output
layer is quantized too: on a CPU that emulates bfloat16 it makes up most of the cost of verifying several tokens.
The format is `int-quantized` of compressed-tensors. One file of weights is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.engines.models import load_config
from specbranch.errors import SpecBranchError, first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch import nn
    from transformers import AutoModelForCausalLM

MAX_INT8 = 127
_MIN_PEAK = 1e-8  # lower bound of a channel's largest weight, so that no scale is zero
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # never copied
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config fields of mixture-of-experts models
_INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}

Report = Callable[[str, int | None, int | None], None]


class QuantizeError(SpecBranchError, ValueError):
    """The checkpoint cannot be quantized; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The names of the weights of a model's linear layers and of its input embedding."""

    linears: frozenset[str]
    input_embedding: str
    is_tied: bool  # the output layer shares the weights of the input embedding

    OUTPUT = "lm_head.weight"


def quantize_checkpoint(source: Path, out: Path, report: Report) -> None:
    """Write the dense checkpoint `source` with 8-bit weights to the new directory `out`; on failure leave no files.

    `report` is called with a phrase, the number of files done, and the number of all files.
    """
    config, files = _read(source)
    layers = find_layers(source)
    _check_names(layers, files, source)
    if out.exists():
        raise QuantizeError(f"{out} exists; name a directory that does not exist yet")
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        places: dict[str, str] = {}
        for done, file in enumerate(files):
            report("quantizing files of weights", done, len(files))
            tensors = quantize_file(file, layers)
            save_file(tensors, part / file.name, metadata={"format": "pt"})
            shutil.copymode(file, part / file.name)  # `save_file` makes files that only their owner can read
            places |= dict.fromkeys(tensors, file.name)
        _write_index(part, places, len(files))
        _copy_rest(source, part)
        changed = {**config, "tie_word_embeddings": False, "quantization_config": quantization_config()}
        (part / "config.json").write_text(json.dumps(changed, indent=2) + "\n")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    report("quantizing files of weights", len(files), len(files))


def quantization_config() -> dict[str, Any]:
    """Return the `quantization_config` for `config.json`, from which vLLM learns that the weights are in W8A8.

    It covers linear layers and the output layer: weights have a scale per output channel, activations one per token.
    """
    group = {
        "targets": ["Linear", "re:.*lm_head"],
        "weights": {**_INTEGERS, "strategy": "channel", "dynamic": False},
        "input_activations": {**_INTEGERS, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        "kv_cache_scheme": None,
    }


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [outputs, inputs] rounded to 8-bit integers, and the scale of each output, [outputs, 1]."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True).clamp_(min=_MIN_PEAK).div_(MAX_INT8)
    return (weight / scales).round_().to(torch.int8), scales


def quantize_file(file: Path, layers: Layers) -> dict[str, torch.Tensor]:
    """Read one file of weights and return its tensors by name: linear layers as integers and scales, others unchanged.

    A tied output layer gets integers and scales of its own, made from the input embedding.
    """
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # not a dictionary
            tensor = weights.get_tensor(name)
            if name == layers.input_embedding:
                tensors[name] = tensor
                if layers.is_tied:
                    _add_linear(tensors, Layers.OUTPUT, tensor)
            elif name in layers.linears and not (layers.is_tied and name == Layers.OUTPUT):
                _add_linear(tensors, name, tensor)
            elif name != Layers.OUTPUT:
                tensors[name] = tensor
    return tensors


def find_layers(source: Path) -> Layers:
    """Find a model's linear layers and input embedding by building it without weights, and return their names.

    Raises `QuantizeError` for an unsupported model.
    """
    try:
        config = load_config(str(source))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise QuantizeError(f"Transformers does not know the model of {source}: {first_line(error)}") from error
    if config.get_text_config() is not config:
        raise QuantizeError(f"{source} is a model for more than text; only language models can be quantized here")
    for count in _EXPERTS:
        if getattr(config, count, None):
            raise QuantizeError(f"{source} is a mixture of experts, which cannot be quantized here; use llm-compressor")
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    linears = {names[id(module)] for module in model.modules() if type(module) is nn.Linear}
    if Layers.OUTPUT not in linears:
        raise QuantizeError(f"the output layer of {source} is not a linear layer called lm_head; use llm-compressor")
    embedding = names[id(model.get_input_embeddings())]
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and name not in linears and name != embedding:
            raise QuantizeError(
                f"{name} of {source} is neither a linear layer nor the input embedding, so it cannot be quantized "
                "here; use llm-compressor"
            )
    return Layers(frozenset(linears), embedding, bool(config.tie_word_embeddings))


def _read(source: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the config and the weight files of a checkpoint.

    Raises `QuantizeError` if either is missing or the weights are quantized already.
    """
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise QuantizeError(
            f"{source} has no config.json that can be read ({error}); give the directory of a Transformers model"
        ) from error
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise QuantizeError(
            f"{source} is quantized already ({method}); give the dense checkpoint that it was made from"
        )
    files = sorted(file for file in source.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise QuantizeError(f"{source} has no weights in safetensors; give a checkpoint that has them")
    return config, files


def _check_names(layers: Layers, files: list[Path], source: Path) -> None:
    """Raise `QuantizeError` if a weight in `layers` is in none of the files: its layer would stay dense unnoticed."""
    held: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            held.update(weights.keys())
    needed = {*layers.linears, layers.input_embedding} - ({Layers.OUTPUT} if layers.is_tied else set())
    lacking = sorted(needed - held)
    if lacking:
        raise QuantizeError(
            f"the files of {source} hold no {lacking[0]}, which the model has ({len(lacking)} such names); use "
            "llm-compressor, or save the model again with `save_pretrained` of Transformers"
        )


def _add_linear(tensors: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
    tensors[name], tensors[f"{name}_scale"] = quantize_weight(weight)


def _write_index(out: Path, places: dict[str, str], num_files: int) -> None:
    if num_files > 1:
        (out / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2) + "\n")


def _copy_rest(source: Path, out: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, out)
