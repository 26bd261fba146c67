"""Small models of random weights, made on the spot: Triton's interpreter is too slow for a real vocabulary."""

from __future__ import annotations

from pathlib import Path

VOCAB_LEN = 96


def write_pair(directory: Path) -> tuple[Path, Path]:
    """A target, and a draft that agrees with it most of the time: the same weights with some noise."""
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
