"""Loads a model of Transformers for the torch engine: finds it, converts its weights, replaces its layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.model_config import read_config
from specbranch.engines.options import DTYPES, EngineOptions, local_model
from specbranch.engines.pretrained import load_model
from specbranch.engines.protocol import EngineError
from specbranch.engines.torch.attention import PlainModel
from specbranch.engines.torch.dtype import PLAIN, fastest_dtype
from specbranch.engines.torch.fused import FusedModel, Kind, can_fuse
from specbranch.engines.torch.int8 import PACKED, can_int8, pack_linears, packed_bytes
from specbranch.engines.torch.joined import JoinedLinear
from specbranch.engines.torch.support import first_line, require_full_attention, text_config

with extra("torch"):
    from transformers import GgufConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to be run."""

    name: str  # of its class in Transformers
    model: Any  # a FusedModel or a PlainModel
    dtype: str  # of its weights
    config: Any  # of its language model, as Transformers has it


def load(options: EngineOptions) -> Loaded:
    """The model of the options, with our attention in its layers."""
    _require_dtype(options)
    _require_dense(options)
    source, arguments = _source(options.model)
    is_here = local_model(options.model) is not None
    options.tell("loading weights" if is_here else f"fetching {options.model} from the Hugging Face hub, or its cache")
    try:
        given = load_model(source, dtype=PLAIN.get(options.dtype, "auto"), **arguments)
        require_full_attention(given, options.max_tokens)
        name, config = type(given).__name__, text_config(given)
        given = given.to(options.device).eval()
        model, dtype = _converted(given, options)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"cannot load {options.model!r} on {options.device}: {first_line(error)}; give a directory with "
            "config.json and safetensors, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face "
            "hub"
        ) from error
    return Loaded(name, model, dtype, config)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once: what one step must at least read."""
    plain: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return plain + packed_bytes(model)


def _converted(model: Any, options: EngineOptions) -> tuple[Any, str]:
    """The model with its weights in the dtype of the options and with our layers, and that dtype."""
    dtype = options.dtype
    if dtype == "auto" and options.device == "cpu":
        options.tell("timing data types")
        choice = fastest_dtype(model)
        log.info("draft on the CPU in %s", choice)
        dtype = choice.dtype
    if dtype in PACKED:
        options.tell(f"packing weights in {dtype}")
        return pack_linears(_ours(model.float(), PACKED[dtype]), PACKED[dtype]), dtype
    # Weights only: what a model keeps beside them, such as its rotary frequencies, needs 32 bits.
    for weight in model.parameters():
        weight.data = weight.data.to(PLAIN.get(dtype, weight.dtype))
    dtype = str(model.dtype).removeprefix("torch.")
    return _ours(model, JoinedLinear), dtype


def _ours(model: Any, kind: Kind) -> Any:
    return FusedModel(model, kind) if can_fuse(model) else PlainModel(model)


def _require_dtype(options: EngineOptions) -> None:
    if options.dtype not in DTYPES:
        raise EngineError(f"there is no dtype {options.dtype!r}; give {', '.join(DTYPES)}")
    if options.dtype in PACKED and options.device != "cpu":
        raise EngineError(f"dtype {options.dtype} is for the CPU; give auto, {', '.join(PLAIN)}")
    if options.dtype in PACKED and not can_int8():
        raise EngineError(
            f"this build of torch has no kernels for dtype {options.dtype}; give auto or bfloat16, or use the "
            "llamacpp engine with a GGUF file"
        )


def _require_dense(options: EngineOptions) -> None:
    """Refuse quantized weights where they would be converted: integers without their scales mean nothing."""
    section = (read_config(options.model) or {}).get("quantization_config")
    if section and (options.device == "cpu" or options.dtype != "auto"):
        raise EngineError(
            f"{options.model} is quantized already ({section.get('quant_method', 'by an unknown method')}), and the "
            "torch engine quantizes dense weights itself; give the dense checkpoint that it was made from"
        )


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """What to call `load_model` with."""
    path = local_model(model)
    if path is None:
        return model, {}
    gguf = _gguf_file(path)
    if gguf is None:
        return str(path), {}
    return str(gguf.parent), {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}


def _gguf_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise EngineError(f"{path} holds {len(files)} GGUF files; name one of them")
    return files[0] if files else None
