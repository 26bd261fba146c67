"""A model that tosses a coin at every token, made on the spot: its distribution is known without an estimate."""

from __future__ import annotations

from pathlib import Path

NUM_COINS = 2048  # each has two tokens, 2 i and 2 i + 1
VOCAB_LEN = 2 * NUM_COINS
_HIDDEN_LEN = 128


def write_coins(directory: Path) -> tuple[Path, Path]:
    """Write a target that says, behind a token of a coin, either token of that coin with probability 1/2; and a draft.

    The state of a token is a direction of its coin, which no layer changes. Any two directions are so far apart that
    the tokens of all other coins together have less than e^-50 of the weight. The draft knows nothing, all tokens are
    alike to it: what is drafted comes from the text and from past answers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCAB_LEN,
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
