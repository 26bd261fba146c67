#!/usr/bin/env python
"""Which tokens to prepare for a refusal where draft tokens are drawn by chance (rule B): exact chances, no serving.

studies/09-sampled/run.py TARGET DRAFT --data DATA [--prompts 8] [--tokens 48] [--out studies/09-sampled/result.json]

The target answers by sampling. At every place of its answers both models' whole distributions are known: p, what the target
samples from, and q, what the service would draw a token from. So the chance of every verdict is computed, not counted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbranch.bench.scenario import read_prompts
from specbranch.core.distribution import MAX_IDS, Distribution, RequestSampling
from specbranch.machine import provenance

TASKS = {"humaneval": "humaneval", "gsm8k": "gsm8k", "summarization": "spec_bench", "chat": "spec_bench"}
SAMPLINGS = {"temperature 1": RequestSampling(1.0), "temperature 0.7, top-p 0.9": RequestSampling(0.7, 0.9)}
ROOTS = (1, 2, 4, 8)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """One place of an answer, over the draft's likeliest tokens, the likeliest first."""

    p: Array  # the target's probabilities of them
    q: Array  # what a token is drawn from
    raw: Array  # the draft's own, at temperature 1

    @property
    def overlap(self) -> float:
        """The chance that a token drawn from q is kept."""
        return float(np.minimum(self.p, self.q).sum())

    def after_refusal(self) -> tuple[Array, Array]:
        """Once a drawn token was refused: the chances of which it was, and of what the target says in its place."""
        refused = np.maximum(self.q - self.p, 0.0)
        lost = max(1 - self.overlap, 1e-12)
        return refused / max(refused.sum(), 1e-12), np.maximum(self.p - self.q, 0.0) / lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8, help="of each task; every second one is only learned from")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (args.target, args.draft)
    )
    rows: list[dict[str, Any]] = []
    for name, sampling in SAMPLINGS.items():
        known: dict[str, list[list[Place]]] = {}
        for task, file in TASKS.items():
            prompts = read_prompts(task, args.data / f"{file}.jsonl", args.prompts)
            known[task] = places(tokenizer, target, draft, prompts, sampling, args.tokens)
            print(f"{name}: {task} has {sum(map(len, known[task]))} places", flush=True)
        weights = learn([place for answers in known.values() for answer in answers[::2] for place in answer])
        rows += [
            {"sampling": name, "task": task, **judge([place for answer in answers[1::2] for place in answer], weights)}
            for task, answers in known.items()
        ]
    document = {"provenance": provenance(), "prompts": args.prompts, "tokens": args.tokens, "rows": rows}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


@torch.inference_mode()
def places(
    tokenizer: Any, target: Any, draft: Any, prompts: list[str], sampling: RequestSampling, tokens: int
) -> list[list[Place]]:
    """What both models say along sampled answers, by prompt."""
    torch.manual_seed(0)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    length = batch["input_ids"].shape[1]
    sampled = target.generate(
        **batch, do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0, max_new_tokens=tokens
    )
    found = []
    for sequence, mask in zip(sampled, batch["attention_mask"], strict=True):
        prompt = sequence[:length][mask.bool()].tolist()
        answer = sequence[length:].tolist()
        ends = [index for index, token in enumerate(answer) if token == tokenizer.eos_token_id]
        answer = answer[: ends[0] + 1] if ends else answer
        text = torch.tensor([[*prompt, *answer]])
        own, drafted = (
            model(text, logits_to_keep=len(answer) + 1).logits[0, :-1].double() for model in (target, draft)
        )
        found.append([place(one, other, sampling) for one, other in zip(own, drafted, strict=True)])
    return found


def place(target: torch.Tensor, draft: torch.Tensor, sampling: RequestSampling) -> Place:
    """Both distributions at one place, of their logits."""
    raw, ids = torch.softmax(draft, -1).topk(MAX_IDS)
    q = np.zeros(MAX_IDS)
    kept = sampling.apply(Distribution(tuple(ids.tolist()), tuple(raw.tolist()), 0.0)).probs
    q[: len(kept)] = kept
    p = torch.softmax(target / sampling.temperature, -1)
    if sampling.top_p < 1.0:
        ordered, order = p.sort(descending=True)
        p[order[ordered.cumsum(-1) - ordered >= sampling.top_p]] = 0.0
        p = p / p.sum()
    return Place(p[ids].numpy(), q / q.sum(), raw.numpy())


def features(place: Place, refused: int) -> Array:
    """What the draft knows of each token when one was refused: rank among the others, probabilities. [ids, features]"""
    ranks = np.arange(MAX_IDS)
    ranks[refused + 1 :] -= 1
    known = np.stack([np.log(place.raw + 1e-9), place.q, np.log(place.raw / place.raw[refused] + 1e-9)], -1)
    return np.concatenate([np.eye(MAX_IDS)[ranks], known], -1)


def likely(place: Place, least: float = 1e-3) -> list[tuple[int, float]]:
    """Tokens that may be drawn and refused, with their chances."""
    chances, _ = place.after_refusal()
    return [(index, float(chance)) for index, chance in enumerate(chances) if chance >= least]


def learn(known: list[Place]) -> Array:
    """Weights of the features, by which the target's token after a refusal is likeliest where it was seen."""
    inputs, outcomes, counts, out = [], [], [], []
    for one in known:
        if one.overlap > 0.999:
            continue
        _, says = one.after_refusal()
        for index, chance in likely(one, least=0.05):
            inputs.append(features(one, index))
            outcomes.append(says)
            counts.append(chance * (1 - one.overlap))
            out.append(np.arange(MAX_IDS) == index)
    x, y = torch.tensor(np.array(inputs)), torch.tensor(np.array(outcomes))
    count, is_out = torch.tensor(counts), torch.tensor(np.array(out))
    weights = torch.zeros(x.shape[-1], dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = (x @ weights).masked_fill(is_out, -30.0)
        value = (
            -(count[:, None] * y * torch.log_softmax(scores, -1)).sum() / count.sum() + 1e-3 * weights.square().sum()
        )
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach().numpy()


def judge(known: list[Place], weights: Array) -> dict[str, Any]:
    """Means over places; what follows a refusal counts as often as there is one."""
    kept = np.array([one.overlap for one in known])
    first = np.array([one.p[0] for one in known])
    orders = {name: np.zeros(len(ROOTS)) for name in ("likeliest", "with the refused", "learned", "best")}
    beside_first, own = np.zeros(len(ROOTS)), np.zeros(len(ROOTS))
    for one in known:
        _, says = one.after_refusal()
        own += np.array([one.p[:k].sum() for k in ROOTS])
        beside_first += np.array([one.p[1 : k + 1].sum() for k in ROOTS])
        for index, chance in likely(one):
            others = np.delete(np.arange(MAX_IDS), index)
            scores = features(one, index) @ weights
            found = {
                "likeliest": others,
                "with the refused": np.arange(MAX_IDS),
                "learned": others[np.argsort(-scores[others], kind="stable")],
                "best": np.argsort(-says, kind="stable"),
            }
            for name, order in found.items():
                orders[name] += chance * (1 - one.overlap) * np.array([says[order[:k]].sum() for k in ROOTS])
    lost, lost_first = (1 - kept).sum(), (1 - first).sum()
    prepared_b = kept.mean() + orders["likeliest"] / len(known)
    prepared_a = first.mean() + beside_first / len(known)

    def table(values: Array) -> dict[str, float]:
        return {str(k): round(float(value), 4) for k, value in zip(ROOTS, values, strict=True)}

    return {
        "places": len(known),
        "kept_drawn": round(float(kept.mean()), 4),
        "kept_first": round(float(first.mean()), 4),
        "roots_after_refusal_drawn": {name: table(values / lost) for name, values in orders.items()},
        "roots_after_refusal_first": table(beside_first / lost_first),
        "roots_of_own_token": table(own / len(known)),
        "prepared_drawn": table(prepared_b),
        "prepared_first": table(prepared_a),
    }


if __name__ == "__main__":
    main()
