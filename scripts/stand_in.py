#!/usr/bin/env python3
"""Make a tiny model of random weights whose step in vLLM takes a CPU about as long as a large model's takes a GPU.

It has the tokenizer and the vocabulary of a given directory of Transformers, and one key and value head, so that long
contexts need little memory. It writes nonsense with confidence: used as its own draft, it agrees with itself. A draft
of fewer layers agrees as well: the layers that it lacks take their time, but add nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

_HEAD = 64  # width of an attention head
_SHARPNESS = 25.0  # standard deviation of the logits; the first of 50,000 is then about 5 above the second
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json and a tokenizer")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--draft", type=Path, help="directory to write a draft of one layer to")
    parser.add_argument("--hidden", type=int, default=64, help=f"hidden size, a multiple of {_HEAD}")
    parser.add_argument("--context", type=int, default=32768, help="most tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.hidden % _HEAD:
        parser.error(f"--hidden is {args.hidden}; give a multiple of {_HEAD}")
    given = json.loads((args.model / "config.json").read_text())
    config = config_of(given, args.layers, args.hidden, args.context)
    num_felt = args.layers if args.draft is None else 1
    write(args.model, args.out, config, num_felt, args.seed)
    if args.draft is not None:
        write(args.model, args.draft, {**config, "num_hidden_layers": num_felt}, num_felt, args.seed)
    print(f"{args.out}: {args.layers} layers of width {args.hidden}, {config['vocab_size']} tokens")


def config_of(given: dict[str, Any], num_layers: int, hidden_len: int, context_len: int) -> dict[str, Any]:
    """A Llama with the vocabulary and the special tokens of another model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_len,
        "intermediate_size": 2 * hidden_len,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_len // _HEAD,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
        **{name: given[name] for name in _KEPT if name in given},
    }


def write(model: Path, out: Path, config: dict[str, Any], num_felt: int, seed: int = 0) -> None:
    """The stand-in, with everything of the model beside it that is neither weights nor config.

    Layers behind the first `num_felt` add nothing.
    """
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".index.json", ".gguf")):
            shutil.copy(path, out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        weights(config, num_felt, np.random.default_rng(seed)), out / "model.safetensors", metadata={"format": "pt"}
    )


def weights(config: dict[str, Any], num_felt: int, chance: np.random.Generator) -> dict[str, Any]:
    """Random weights under which all activations stay of the order of one."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, head_len = config["num_attention_heads"], config["head_dim"]

    def matrix(num_out: int, num_in: int) -> Any:
        return chance.standard_normal((num_out, num_in), dtype=np.float32) / np.float32(num_in**0.5)

    def ones() -> Any:
        return np.ones(hidden, dtype=np.float32)

    found = {
        "model.embed_tokens.weight": chance.standard_normal((vocab, hidden), dtype=np.float32),
        "model.norm.weight": _SHARPNESS * ones(),
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": ones(),
            "self_attn.q_proj": matrix(heads * head_len, hidden),
            "self_attn.k_proj": matrix(head_len, hidden),
            "self_attn.v_proj": matrix(head_len, hidden),
            "self_attn.o_proj": matrix(hidden, heads * head_len),
            "post_attention_layernorm": ones(),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        if layer >= num_felt:
            for last in ("self_attn.o_proj", "mlp.down_proj"):
                parts[last] *= 0
        found |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return found


if __name__ == "__main__":
    main()
