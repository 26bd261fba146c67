"""Models and tokenizers of Transformers. Nothing that lies beside their weights is run: no code, and no pickles."""

from __future__ import annotations

from typing import Any


def load_model(source: str, **arguments: Any) -> Any:
    """A model with weights in safetensors or GGUF; others are refused, since reading a pickle can run anything."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, use_safetensors=True, **arguments)


def load_tokenizer(source: str) -> Any:
    """A tokenizer of a class that Transformers itself has."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def load_config(source: str) -> Any:
    """Read the configuration of a model of a class that Transformers itself has."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, trust_remote_code=False)
