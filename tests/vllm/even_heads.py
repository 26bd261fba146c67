"""A model that can be divided among two workers, made of one that cannot: SmolLM2 has nine heads in three groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_NUM_GROUPS = 2


def write_even(model: Path, out: Path) -> Path:
    """The same model without its last group of attention heads; it makes little sense, but no less than it needs to."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((model / "config.json").read_text())
    each = config["num_attention_heads"] // config["num_key_value_heads"]
    width = config["hidden_size"] // config["num_attention_heads"]
    keep = {"q_proj": each * _NUM_GROUPS * width, "k_proj": _NUM_GROUPS * width, "v_proj": _NUM_GROUPS * width}
    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if part in keep:
            tensors[name] = tensor[: keep[part]].contiguous()
        elif part == "o_proj":
            tensors[name] = tensor[:, : keep["q_proj"]].contiguous()
    config |= {"num_attention_heads": each * _NUM_GROUPS, "num_key_value_heads": _NUM_GROUPS, "head_dim": width}
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
