"""Loads a model of Transformers for the torch engine: finds it, converts its weights, replaces its layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.heads import read_heads
from specbranch.engines.options import DTYPES, EngineOptions, local_model
from specbranch.engines.protocol import EngineError
from specbranch.engines.torch import attention
from specbranch.engines.torch.dtype import PLAIN, fastest_dtype
from specbranch.engines.torch.fused import fuse
from specbranch.engines.torch.guess import GuessHead, narrowed
from specbranch.engines.torch.int8 import PACKED, can_int8, pack_linears, packed_bytes
from specbranch.engines.torch.support import first_line, require_full_attention

with extra("torch"):
    from transformers import AutoModelForCausalLM, GgufConfig

log = logging.getLogger(__name__)


def load(options: EngineOptions) -> tuple[Any, str, GuessHead | None]:
    """The model, ready to be run with our attention, the dtype of its weights, and its heads, if it is to have any."""
    _require_dtype(options)
    heads = read_heads(Path(options.heads)) if options.heads else None
    source, arguments = _source(options.model)
    is_here = local_model(options.model) is not None
    options.tell("loading weights" if is_here else f"fetching {options.model} from the Hugging Face hub, or its cache")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=PLAIN.get(options.dtype, "auto"), **arguments)
        model = model.to(options.device).eval()
        narrow = narrowed(model, heads) if heads else None  # before the output layer is packed
        model, dtype = _converted(model, options)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"cannot load {options.model!r} on {options.device}: {first_line(error)}; give a directory with "
            "config.json and safetensors, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face "
            "hub"
        ) from error
    require_full_attention(model, options.max_tokens)
    model.set_attn_implementation(attention.NAME)
    if heads is None or narrow is None:
        return model, dtype, None
    if heads.card.draft != Path(options.model).name:
        log.warning("the heads were trained for %s, the draft is %s", heads.card.draft, options.model)
    return model, dtype, GuessHead(heads, model, narrow, PACKED.get(dtype))


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights, tied ones counted once: what one step must at least read."""
    plain: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return plain + packed_bytes(model)


def _converted(model: Any, options: EngineOptions) -> tuple[Any, str]:
    """The model with its weights in the dtype of the options, and that dtype."""
    dtype = options.dtype
    if dtype == "auto" and options.device == "cpu":
        options.tell("timing data types")
        choice = fastest_dtype(model)
        log.info("draft on the CPU in %s", choice)
        dtype = choice.dtype
    if dtype in PACKED:
        kind = PACKED[dtype]
        options.tell(f"packing weights in {dtype}")
        return pack_linears(fuse(model.float(), attention.attend, kind), kind), dtype
    # Weights only: what a model keeps beside them, such as its rotary frequencies, needs 32 bits.
    for weight in model.parameters():
        weight.data = weight.data.to(PLAIN.get(dtype, weight.dtype))
    return model, str(model.dtype).removeprefix("torch.")


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


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """What to call `from_pretrained` with."""
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
