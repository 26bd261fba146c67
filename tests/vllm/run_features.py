"""Compare the features that the proposer takes from vLLM with those of Transformers; print one JSON document.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.round import Signal
from specbranch.hrad.network import write_hrad
from tests.service.harness import free_port, scrape
from tests.vllm.runs import draft_service, drafting, metric, num_equal, proposer_of, tokens_of

SUBJECTS = ("water", "the moon", "a fox", "bread", "winter")
SHORT = [f"Here is a story about {subject}." for subject in SUBJECTS]
PROMPTS = [*SHORT, f"{' '.join(SHORT * 6)} The most important fact about music is"]  # the last is read in pieces
NUM_LAYERS = 4
NUM_SUBMITTED = 4
HIDDEN = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, draft_service(args.draft, "--metrics-port", str(port)) as address:
        result = _compare(args.target, address, Path(directory), port, args.tokens)
    print(json.dumps(result))


def _compare(target: str, address: str, directory: Path, port: int, num_tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from specbranch.launch import vllm_engine as engine
    from specbranch.plugins.vllm.settings import read_settings

    common: dict[str, Any] = {
        "model": target,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    predictors = {name: _write(directory / name, target, name, NUM_LAYERS) for name in ("all", "none", "random")}
    # It waits after a miss, so that there are drafts however slow this machine is.
    section = {"planner": "specbranch", "settings": {"wait_for_draft": True}, "predictor": predictors["all"]}
    result: dict[str, Any] = {"refusal": _refusal(common, drafting(address, **section))}

    bare = LLM(**common, enforce_eager=True)
    # A last step may accept more than is asked for.
    longer = SamplingParams(temperature=0.0, max_tokens=num_tokens + NUM_SUBMITTED, ignore_eos=True)
    outputs = bare.generate(PROMPTS, longer, use_tqdm=False)
    wholes = [[*out.prompt_token_ids, *text] for out, text in zip(outputs, tokens_of(outputs), strict=True)]
    texts = [text[:num_tokens] for text in tokens_of(outputs)]
    del bare
    gc.collect()

    llm = LLM(**common, enforce_eager=True, **drafting(address, **section))
    proposer = proposer_of(llm)
    runs: dict[str, Any] = {}
    seen: dict[tuple[int, ...], Any] = {}
    told = 0.0
    for name, predictor in predictors.items():
        if name != "all":
            ours = drafting(address, **{**section, "predictor": predictor})["additional_config"]["specbranch"]
            proposer.configure(read_settings(ours))
        _watch(llm, proposer, seen)
        before = engine.draft_tokens(llm)
        found = tokens_of(llm.generate(PROMPTS, greedy, use_tqdm=False))
        submitted, accepted = (after - count for after, count in zip(engine.draft_tokens(llm), before, strict=True))
        told += proposer.counts()["hints"]
        runs[name] = {
            "equal": num_equal(texts, found),
            "submitted": submitted,
            "accepted": accepted,
            **{key: proposer.counts()[key] for key in ("calls", "hints", "hint_faults", "hint_s", "faults")},
        }
    result |= {"prompts": len(PROMPTS), "runs": runs, "preemptions": metric(llm, "vllm:num_preemptions")}
    result |= {"told": told, "heard": scrape(port, "specbranch_draft_hints_total")}
    del llm, proposer
    gc.collect()
    return {**result, **_errors(target, wholes, seen)}


def _write(directory: Path, target: str, kind: str, num_layers: int) -> str:
    """A predictor that always says the same, or one with random weights."""
    hidden_len = json.loads((Path(target) / "config.json").read_text())["hidden_size"]
    d_in, (h0, h1), rng = (num_layers + 1) * hidden_len, HIDDEN, np.random.default_rng(7)
    shapes = {"mean": (d_in,), "scale": (d_in,), "w0": (d_in, h0), "b0": (h0,), "w1": (h0, h1), "b1": (h1,)}
    shapes |= {"w_class": (h1, 3), "b_class": (3,), "w_survival": (h1, NUM_SUBMITTED), "b_survival": (NUM_SUBMITTED,)}
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    if kind != "random":
        tensors["b_class"][Signal[kind.upper()]] = 1e9
    card = {
        "target": target,
        "draft": "any",
        "num_layers": num_layers,
        "hidden_len": hidden_len,
        "window": NUM_SUBMITTED,
    }
    write_hrad(directory, tensors, {**card, "tasks": [], "positions": 0, "commit": None})
    return str(directory)


def _refusal(common: dict[str, Any], ours: dict[str, Any]) -> str:
    """What a compiled target says to a predictor that looks at several layers."""
    from vllm import LLM

    try:
        LLM(**common, enforce_eager=False, **ours)
    except Exception as error:
        return str(error)
    return ""


def _watch(llm: Any, proposer: Any, seen: dict[tuple[int, ...], Any]) -> None:
    """Note the features of every text from now on."""
    batch = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.input_batch
    feature_hook = proposer.feature_hook
    read = type(feature_hook).read

    def reading(sampled: Any, rows: Any) -> Any:
        features = read(feature_hook, sampled, rows)
        for row, one in zip(rows, features, strict=True):
            text = tuple(batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist())
            seen.setdefault(text, []).append((one, len(sampled[row])))
        return features

    feature_hook.read = reading


def _errors(target: str, wholes: list[list[int]], seen: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    """The largest error of each part, relative to its norm, and what the texts were that it was taken over."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    errors: list[list[float]] = []
    news: list[int] = []
    unknown = 0
    states = []
    for whole in wholes:
        with torch.no_grad():
            found = model(torch.tensor([whole]), output_hidden_states=True).hidden_states[-NUM_LAYERS:]
        states.append([state[0].numpy() for state in found])
    embeddings = model.get_input_embeddings().weight.detach().numpy()
    for text, records in seen.items():
        place = next((index for index, whole in enumerate(wholes) if whole[: len(text)] == list(text)), None)
        if place is None:
            unknown += 1
            continue
        right = [*(state[len(text) - 2] for state in states[place]), embeddings[text[-1]]]
        for features, num_new in records:
            parts = np.split(features, NUM_LAYERS + 1)
            pairs = zip(parts, right, strict=True)
            errors.append([float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs])
            news.append(num_new)
    return {
        "errors": np.max(errors, axis=0).tolist(),
        "compared": len(errors),
        "after_accepted": sum(num_new > 1 for num_new in news),
        "unknown": unknown,
    }


if __name__ == "__main__":
    main()
