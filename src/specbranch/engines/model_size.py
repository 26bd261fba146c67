"""How many bytes the weights of a model take, from its files: nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbranch.engines.model_config import read_config
from specbranch.engines.options import local_model

_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_KINDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")  # the first kind that is there counts


def weight_bytes(model: str, dtype: str | None = None) -> int:
    """Bytes of a model's weights in memory, in `dtype` or their own; 0 if the model is not on this machine."""
    path = local_model(model)
    if path is None:
        return 0
    if path.is_file():
        return path.stat().st_size
    files = next((found for kind in _KINDS if (found := _files(path, kind))), [])
    return int(sum(file.stat().st_size for file in files) * _growth(read_config(model) or {}, dtype))


def _files(path: Path, kind: str) -> list[Path]:
    """The files of one kind; some models keep a second copy of all weights in another layout."""
    files = list(path.glob(kind))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _growth(table: Mapping[str, Any], dtype: str | None) -> float:
    """How much larger weights are in `dtype` than in the files; quantized ones keep their type."""
    own = _BYTES.get(str(table.get("dtype") or table.get("torch_dtype")).removeprefix("torch."))
    asked = _BYTES.get((dtype or "").removeprefix("torch."))
    return asked / own if own and asked and "quantization_config" not in table else 1.0
