"""Models that tests make on the spot: coins with a known distribution, random weights, and heads for two workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

NUM_COINS = 2048  # each has two tokens, 2 i and 2 i + 1
VOCAB_LEN = 96  # of the random models
_HIDDEN_LEN = 128
_NUM_GROUPS = 2


def write_coins(directory: Path) -> tuple[Path, Path]:
    """Write a target that tosses a coin at every token, so that its distribution is known exactly; and a draft.

    After a token of a coin the target says either token of that coin with probability 1/2. The state of a token is a
    direction of its coin, which no layer changes. Any two directions are so far apart that the tokens of all other
    coins together have less than e^-50 of the weight. The draft gives all tokens the same probability, so drafts come
    from the text and from past answers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=2 * NUM_COINS,
        hidden_size=_HIDDEN_LEN,
        intermediate_size=_HIDDEN_LEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape)
    directions = torch.nn.functional.normalize(torch.randn(NUM_COINS, _HIDDEN_LEN), dim=1)
    coins = directions.repeat_interleave(2, dim=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(coins)
        model.lm_head.weight.copy_(16 * coins)
        target, draft = directory / "target", directory / "draft"
        model.save_pretrained(target)
        model.lm_head.weight.zero_()
        model.save_pretrained(draft)
    return target, draft


def write_pair(directory: Path) -> tuple[Path, Path]:
    """Write a target of random weights and a draft that mostly agrees with it: the same weights with some noise.

    The vocabulary is small, because Triton's interpreter is too slow for a real one.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=VOCAB_LEN,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # so large that the likeliest token stands out
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(shape)
    target, draft = directory / "target", directory / "draft"
    model.save_pretrained(target)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.02 * weights.std() * torch.randn_like(weights) if weights.dim() > 1 else 0
    model.save_pretrained(draft)
    return target, draft


def write_hybrid(directory: Path) -> Path:
    """Write a tiny Qwen3-Next with random weights: three layers with a recurrent state, and one with attention."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(7)
    shape = Qwen3NextConfig(
        vocab_size=VOCAB_LEN,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3NextForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_even(model: Path, out: Path) -> Path:
    """Write the model without its last group of attention heads, so that two workers can divide it.

    SmolLM2 has nine heads in three groups. What the new model says makes little sense.
    """
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
