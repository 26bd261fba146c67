"""Decode with and without a LoRA adapter in one batch: bare vLLM, with the proposer, and with one that cannot tell.

Prints one JSON document. A program of its own: vLLM keeps global state, and its environment must be set first.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.vllm.runs import draft_service, drafting, num_equal, proposer_of, tokens_of

PROMPTS = ("Here is a story about the sea.", "The most important fact about water is")
RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    common: dict[str, Any] = {
        "model": args.target,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        "enable_lora": True,
        "max_lora_rank": RANK,
        # Two, though one is used: with one, bare vLLM 0.32 for the CPU gives all rows the same output.
        "max_loras": 2,
    }
    from vllm import LLM

    with tempfile.TemporaryDirectory() as directory, draft_service(args.draft) as address:
        write_adapter(Path(args.target), Path(directory))
        bare = LLM(**common)
        texts = {"bare": _decode(bare, directory)}
        del bare
        gc.collect()
        llm = LLM(**common, **drafting(address))
        proposer = proposer_of(llm)
        drafted: dict[str, Counter[str]] = {}
        for name in ("told", "untold"):
            if name == "untold":
                proposer.on_step_scheduled = proposer._runner = None  # as if the runner had never said who it is
            drafted[name] = _watch(llm, proposer)
            texts[name] = _decode(llm, directory)
        asides = proposer.core._stats.skipped["lora"]
    equal = {name: num_equal(texts["bare"], text) for name, text in texts.items()}
    print(
        json.dumps(
            {
                "rows": len(texts["bare"]),
                "differing": num_equal(texts["bare"][::2], texts["bare"][1::2]) == 0,
                "equal": equal,
                "drafted": drafted,
                "asides": asides,
            }
        )
    )


def write_adapter(target: Path, directory: Path) -> None:
    """A random adapter, strong enough to change what the model says."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((target / "config.json").read_text())
    width = shape["hidden_size"]
    head = width // shape["num_attention_heads"]
    outputs = {"q_proj": width, "v_proj": head * shape["num_key_value_heads"]}
    torch.manual_seed(3)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, out in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, width) * 0.05
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK) * 0.05
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(outputs)}))


def _decode(llm: Any, adapter: str) -> list[list[int]]:
    """Every prompt twice in one batch: with the adapter and without."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    lora = LoRARequest("random", 1, adapter)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    loras = [lora, None] * len(PROMPTS)
    return tokens_of(llm.generate(prompts, greedy, lora_request=loras, use_tqdm=False))


def _watch(llm: Any, proposer: Any) -> Counter[str]:
    """Count the tokens that are drafted from now on for rows with and without an adapter."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    counts: Counter[str] = Counter({"lora": 0, "plain": 0})
    propose = type(proposer).propose

    def watching(*args: Any, **kwargs: Any) -> list[list[int]]:
        drafts: list[list[int]] = propose(proposer, *args, **kwargs)
        for row, draft in enumerate(drafts):
            counts["lora" if runner.input_batch.request_lora_mapping[row] > 0 else "plain"] += len(draft)
        return drafts

    proposer.propose = watching
    return counts


if __name__ == "__main__":
    main()
