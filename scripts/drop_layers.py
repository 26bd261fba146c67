#!/usr/bin/env python3
"""Make a model without some of its layers: a poorly aligned draft, or a small model of real weights for tests.

Takes a GGUF file or a directory of Transformers, and writes the same form.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_GGUF_LAYER = re.compile(r"^(blk\.)(\d+)(\..*)$")
_DENSE_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file, or directory with config.json and safetensors")
    parser.add_argument("out", type=Path, help="GGUF file or directory to write")
    parser.add_argument(
        "--layers", nargs="+", required=True, help="layers to leave out: numbers, or ranges such as 4-25"
    )
    args = parser.parse_args()
    dropped = {layer for word in args.layers for layer in _numbers(word)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drop = _drop_dense if args.model.is_dir() else _drop_gguf
    num_layers, num_kept = drop(args.model, args.out, dropped)
    print(f"{args.out}: {num_kept} of {num_layers} layers")


def _numbers(word: str) -> range:
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


def _kept(num_layers: int, dropped: set[int]) -> list[int]:
    return [layer for layer in range(num_layers) if layer not in dropped]


def _new_name(name: str, pattern: re.Pattern[str], kept: Sequence[int]) -> str | None:
    """A tensor's name in the smaller model; None if its layer is left out."""
    found = pattern.match(name)
    if found is None:
        return name
    layer = int(found[2])
    return f"{found[1]}{kept.index(layer)}{found[3]}" if layer in kept else None


def _drop_gguf(model: Path, out: Path, dropped: set[int]) -> tuple[int, int]:
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(model)
    name = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(out, name)
    num_layers = int(reader.fields[f"{name}.block_count"].contents())
    kept = _kept(num_layers, dropped)
    for field in reader.fields.values():
        if field.name == f"{name}.block_count":
            writer.add_block_count(len(kept))
        elif field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1] if len(kinds) > 2 else None)
    for tensor in reader.tensors:
        new = _new_name(tensor.name, _GGUF_LAYER, kept)
        if new is not None:
            writer.add_tensor(new, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_layers, len(kept)


def _drop_dense(model: Path, out: Path, dropped: set[int]) -> tuple[int, int]:
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    kept = _kept(num_layers, dropped)
    tensors = {}
    for path in model.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            new = _new_name(name, _DENSE_LAYER, kept)
            if new is not None:
                tensors[new] = tensor
    out.mkdir(exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".index.json")):
            shutil.copy(path, out)
    config["num_hidden_layers"] = len(kept)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return num_layers, len(kept)


if __name__ == "__main__":
    main()
