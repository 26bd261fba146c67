#!/usr/bin/env python3
"""Try the torch engine on tiny random models of many architectures: result.json, and the table in docs/dev/engines.md.

    studies/12-families/run.py                 # all: some minutes
    studies/12-families/run.py llama gemma2    # only these; prints, writes nothing
    studies/12-families/run.py --speed MODEL   # what a row costs on both paths; MODEL is a dense model of 0.5B
    studies/12-families/run.py --page          # only the table, from result.json; --check fails if it is another

Each model has known random weights. Three sequences, longer than any window, run with branches, truncations and pieces
in shared steps; every distribution is compared with a forward pass of Transformers over the whole sequence.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from specbranch.core.distribution import Distribution
from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.errors import EngineError, first_line
from specbranch.machine import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT, PAGE = HERE / "result.json", ROOT / "docs" / "dev" / "engines.md"
MARKS = "<!-- families: made by studies/12-families/run.py -->", "<!-- end of families -->"
EXACT = 1e-5  # the largest error in probability that counts as exact in float32
ROUNDING = 0.01  # and as rounding, in models that amplify it
VOCAB_LEN = 128
TINY: Mapping[str, Any] = {
    "vocab_size": VOCAB_LEN, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3,  # at the usual 0.02 all distributions are flat and all sequences alike
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
WINDOW: Mapping[str, Any] = {"sliding_window": 8}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32, "factor": 4.0,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14, "head_dim": 8, "depth": 1, "num_heads": 4, "out_hidden_size": 32, "embed_dim": 32,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
KINDS = ["sliding_attention", "full_attention"] * 2

# Architectures as Transformers names them, with what differs from TINY. A name may have a variant after a comma.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {}, "llama, longrope": {"rope_parameters": LONGROPE}, "llama, dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    },
    "qwen2": {}, "qwen2, window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {}, "mistral": {"sliding_window": None}, "mistral, window": WINDOW, "ministral": {**WINDOW, "layer_types": KINDS},
    "ministral3": {"sliding_window": None},
    "qwen2_moe": EXPERTS, "qwen3_moe": EXPERTS, "mixtral": EXPERTS, "phimoe": {**EXPERTS, "sliding_window": None},
    "phi": {"num_key_value_heads": 4}, "phi3": {"sliding_window": None}, "phi3, window": WINDOW,
    "phi3, longrope": {"rope_parameters": LONGROPE, "sliding_window": None, "original_max_position_embeddings": 32},
    "gemma": {}, "gemma2": {**WINDOW, "query_pre_attn_scalar": 8}, "gemma3_text": {**WINDOW, "layer_types": KINDS},
    "gemma4_text": {**WINDOW, "layer_types": KINDS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_LEN, "global_head_dim": 8},
    "gemma3n_text": {**WINDOW, "layer_types": KINDS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_LEN, "num_kv_shared_layers": 0, "laurel_rank": 4, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "vaultgemma": {**WINDOW, "query_pre_attn_scalar": 8},
    "gpt_oss": {**EXPERTS, **WINDOW, "layer_types": KINDS}, "olmo": {}, "olmo2": {}, "olmo3": {**WINDOW, "layer_types": KINDS}, "olmoe": EXPERTS,
    "flex_olmo": EXPERTS, "granite": {}, "granitemoe": EXPERTS, "granitemoeshared": EXPERTS,
    "granitemoehybrid": {**EXPERTS, "layer_types": ["attention"] * 4, "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid, mamba": {**EXPERTS, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "smollm3": {}, "starcoder2": {"sliding_window": None}, "starcoder2, window": WINDOW, "stablelm": {}, "seed_oss": {}, "arcee": {}, "apertus": {},
    "exaone4": {**WINDOW, "layer_types": KINDS, "sliding_window_pattern": 2}, "exaone_moe": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "cohere": {"logit_scale": 1.0}, "cohere2": {"logit_scale": 1.0, **WINDOW, "layer_types": KINDS}, "glm": {}, "glm4": {}, "glm4_moe": EXPERTS, "glm4_moe_lite": {**EXPERTS, **LATENT},
    "ernie4_5": {}, "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}, "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "minicpm3": LATENT, "deepseek_v2": {**EXPERTS, **LATENT}, "deepseek_v3": {**EXPERTS, **LATENT}, "deepseek_v32": {**EXPERTS, **LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16},
    "longcat_flash": {**EXPERTS, **LATENT}, "dots1": EXPERTS, "nemotron": {}, "nemotron_h": {}, "helium": {}, "bitnet": {}, "diffllama": {},
    "nanochat": {}, "solar_open": EXPERTS, "minimax": EXPERTS, "minimax_m2": EXPERTS, "afmoe": {**EXPERTS, **WINDOW, "layer_types": KINDS}, "jais2": {}, "cwm": {**WINDOW, "layer_types": KINDS}, "youtu": LATENT,
    "mimo_v2_flash": {**EXPERTS, **WINDOW}, "llama4_text": {**EXPERTS, "attention_chunk_size": 16, "intermediate_size_mlp": 64}, "doge": {}, "hrm_text": {}, "persimmon": {}, "gpt2": {"n_positions": 512, "num_key_value_heads": 4}, "gpt_neox": {}, "gptj": {"rotary_dim": 8}, "bloom": {}, "mpt": {"d_model": 32, "n_heads": 4}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "codegen": {"rotary_dim": 8}, "gpt_bigcode": {}, "xglm": {"d_model": 32, "attention_heads": 4, "ffn_dim": 64, "num_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2}, "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "kimi_linear": {**EXPERTS, **LATENT}, "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1, 3]}, "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "mistral3": {"text": {"model_type": "mistral", "sliding_window": None}, "vision": {"model_type": "pixtral"}},
    "gemma3": {"text": {**WINDOW, "layer_types": KINDS}, "vision": {}}, "llava": {"text": {"model_type": "llama"}, "vision": {}},
    "smolvlm": {"text": {"model_type": "llama"}, "vision": {}}, "qwen2_vl": {"text": {"rope_parameters": MROPE}, "vision": {}},
    "qwen2_5_vl": {"text": {"rope_parameters": MROPE}, "vision": {}}, "qwen3_vl": {"text": {"rope_parameters": MROPE}, "vision": {}},
    "qwen3_5": {"text": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, "vision": {}},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_key_value_heads": 4, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "attention_head_dim": 16}, "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8}, "recurrent_gemma": {}, "rwkv": {},
}  # fmt: skip


def save_tiny(name: str, directory: Path) -> None:
    """Write a tiny model of an architecture, with random but fixed weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, given = name.partition(",")[0], {**TINY, **FAMILIES[name]}
    if "text" in given:  # a model that reads images too
        text = given.pop("text")
        given = {"text_config": {**TINY, **text}, "vision_config": VISION | given["vision"], **given}
        del given["vision"]
    config = AutoConfig.for_model(kind, **given)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make = AutoModelForImageTextToText if "text_config" in given else AutoModelForCausalLM
        model = make.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)


def histories(engine: DraftEngine) -> Iterator[tuple[list[int], Distribution]]:
    """Run sequences with pieces, branches and truncations in shared steps; yield sequences and their distributions."""
    texts = [[(row + 7 * place + place * place) % (VOCAB_LEN - 4) + 4 for place in range(60)] for row in range(3)]
    lengths = (45, 4, 20)
    handles = [engine.open() for _ in texts]
    texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def step(rows: list[tuple[int, list[int]]]) -> Iterator[tuple[list[int], Distribution]]:
        given = []
        for index, tokens in rows:
            given.append(Row(handles[index], tuple(tokens)))
            texts[index] += tokens
        for (index, _), distribution in zip(rows, engine.run(given), strict=True):
            yield list(texts[index]), distribution

    engine.run([Row(handle, tuple(text)) for handle, text in zip(handles, texts, strict=True)])
    yield from step([(2, [9, 8]), (0, [5]), (1, [6, 7, 8, 9, 10, 11])])
    for index, length in ((0, 40), (0, 30), (2, 22), (1, 3)):  # branches, across the edge of a window and inside it
        handles.append(engine.fork(handles[index], length))
        texts.append(texts[index][:length])
    yield from step([(3, [20]), (0, [21]), (4, [22, 23, 24]), (5, [25]), (6, [26, 27])])
    engine.truncate(handles[0], 12)
    del texts[0][12:]
    yield from step([(0, [30]), (1, [31]), (3, [32])])
    yield from step([(index, [40 + index]) for index in range(len(handles))])
    for handle in handles:
        engine.close(handle)


def try_family(name: str) -> dict[str, Any]:
    """Return what the engine does with a tiny model of an architecture."""
    import torch

    from specbranch.engines.models import load_model
    from specbranch.engines.torch import TorchEngine, open_torch
    from specbranch.engines.torch.plain import fix_rotary

    with tempfile.TemporaryDirectory() as directory:
        try:
            save_tiny(name, Path(directory))
        except Exception as error:
            return {"family": name, "outcome": "not tried", "why": first_line(error)}
        try:
            engine = open_torch(EngineOptions(directory, dtype="float32", max_tokens=1024, top_k=VOCAB_LEN))
        except EngineError as error:
            return {"family": name, "outcome": "refused", "why": str(error)}
        plain = load_model(directory, dtype=torch.float32, attn_implementation="eager").eval()
        fix_rotary(plain, 1024)  # one choice for all sequences, as the engine makes it
        worst = 0.0
        with torch.inference_mode():
            for text, found in histories(engine):
                expected = plain(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1)
                mine = torch.zeros_like(expected)
                mine[list(found.ids)] = torch.tensor([float(prob) for prob in found.probs])
                worst = max(worst, float((expected - mine).abs().max()))
        is_fast = isinstance(engine, TorchEngine)
        outcome = "states" if is_fast and engine.states is not None else "fast" if is_fast else "generic"
        return {"family": name, "outcome": outcome, "error": worst}


def row_times_ms(engine: DraftEngine, most: int = 8, repeats: int = 5) -> dict[str, float]:
    """Return the time of a step of one, four and eight rows behind 200 tokens."""
    trunk = engine.open()
    engine.run([Row(trunk, tuple(range(5, 205)))])
    handles = [engine.fork(trunk, 200) for _ in range(most)]
    times: dict[int, list[float]] = {count: [] for count in (1, 4, most)}
    for repeat in range(repeats + 1):
        for count, found in times.items():
            start_s = time.perf_counter()
            engine.run([Row(handle, (9 + repeat,)) for handle in handles[:count]])
            found.append(1e3 * (time.perf_counter() - start_s))
            for handle in handles[:count]:
                engine.truncate(handle, 200)
    for handle in (trunk, *handles):
        engine.close(handle)
    return {str(count): round(statistics.median(found[1:]), 1) for count, found in times.items()}


def measure_speed(model: str) -> list[dict[str, Any]]:
    """Return what rows cost on the fast engine and on the generic one, and for a hybrid model of the same size."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specbranch.engines.torch import TorchEngine
    from specbranch.engines.torch.generic import GenericEngine

    options = EngineOptions(model, dtype="float32", max_tokens=4096)
    found = []
    for label, kind in (("fast", TorchEngine), ("generic", GenericEngine)):
        engine = kind(options)
        found.append({"model": Path(model).name, "engine": label, "ms": row_times_ms(engine)})
        engine.shutdown()
    with tempfile.TemporaryDirectory() as name:
        dense = AutoConfig.from_pretrained(model)
        config = AutoConfig.for_model(
            "lfm2", vocab_size=dense.vocab_size, hidden_size=dense.hidden_size, intermediate_size=dense.intermediate_size,
            num_hidden_layers=dense.num_hidden_layers, num_attention_heads=dense.num_attention_heads,
            num_key_value_heads=dense.num_key_value_heads, block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", "full_attention"] * (dense.num_hidden_layers // 3),
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(name)
        options = EngineOptions(name, dtype="float32", max_tokens=4096)
        for label, kind in (("states", TorchEngine), ("generic", GenericEngine)):
            engine = kind(options)
            found.append({"model": "LFM2 of the same size", "engine": label, "ms": row_times_ms(engine)})
            engine.shutdown()
    return found


def shown(row: dict[str, Any]) -> str:
    """Return the name of a family, with its variant in parentheses."""
    name, _, variant = row["family"].partition(", ")
    return f"{name} ({variant})" if variant else name


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""

    def named(outcome: str, low: float, high: float) -> list[dict[str, Any]]:
        return [row for row in rows if row["outcome"] == outcome and low <= row.get("error", 0.0) < high]

    lines = ["| runs on | tiny models of | largest error in probability |", "|---|---|---|"]
    amplified = "; rounding is amplified"
    for label, outcome, inexact in (
        ("the fast engine", "fast", amplified),
        ("the fast engine, with states", "states", f"{amplified}, or its own single steps differ from whole passes"),
        ("the generic path, slower", "generic", amplified),
    ):
        for note, low, high in (("", 0.0, EXACT), (inexact, EXACT, ROUNDING)):
            found = named(outcome, low, high)
            if found:
                worst = max(row["error"] for row in found)
                lines.append(f"| {label}{note} | {', '.join(map(shown, found))} | {worst:.0e} |")
    wrong = [row for row in rows if row.get("error", 0.0) >= ROUNDING]
    lines += [f"| **wrong** | {shown(row)} | {row['error']:.2f} |" for row in wrong]
    lines += [
        f"| refused | {shown(row)} | {row['why'].partition('; choose')[0]} |"
        for row in rows
        if row["outcome"] == "refused"
    ]
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with the table between its marks."""
    text = PAGE.read_text()
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these")
    parser.add_argument("--speed", metavar="MODEL", help="only measure what rows cost")
    parser.add_argument("--page", action="store_true", help="only write the table")
    parser.add_argument("--check", action="store_true", help="only compare the table")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.check:
        sys.exit(PAGE.read_text() != page(json.loads(RESULT.read_text())["rows"]))
    if args.speed:
        document = json.loads(RESULT.read_text())
        document["speed"] = {"rows": measure_speed(args.speed), "provenance": provenance()}
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document["speed"]["rows"], indent=1))
        return
    if not args.page:
        names = [name for name in FAMILIES if not args.families or name.partition(",")[0] in args.families]
        rows = [try_family(name) for name in track(names, "families", transient=True)]
        if args.families:
            print(json.dumps(rows, indent=1))
            return
        import transformers

        document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        document |= {"transformers": transformers.__version__, "rows": rows, "provenance": provenance()}
        RESULT.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULT.read_text())["rows"]))


if __name__ == "__main__":
    main()
