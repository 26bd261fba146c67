#!/usr/bin/env python3
"""Make a poorly aligned draft: a GGUF model without some of its layers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gguf import GGUFReader, GGUFWriter

_LAYER = re.compile(r"^blk\.(\d+)\.(.*)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="numbers of the layers to leave out")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(args.model)
    name = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(args.out, name)
    num_layers = int(reader.fields[f"{name}.block_count"].contents())
    kept = [layer for layer in range(num_layers) if layer not in args.layers]
    for field in reader.fields.values():
        if field.name == f"{name}.block_count":
            writer.add_block_count(len(kept))
        elif field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1] if len(kinds) > 2 else None)
    for tensor in reader.tensors:
        found = _LAYER.match(tensor.name)
        if found is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        elif int(found[1]) in kept:
            new = f"blk.{kept.index(int(found[1]))}.{found[2]}"
            writer.add_tensor(new, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {len(kept)} of {num_layers} layers")


if __name__ == "__main__":
    main()
