#!/usr/bin/env python3
"""A smaller draft: a model without some of its layers, trained for a while to be what it was.

The layers that change their input least are left out. The rest learns, on answers of `specbranch train collect` to
training prompts, the whole model's last hidden states everywhere and, where the target speaks, a distribution half of the whole
model's and half of the target's token. Writes the model to a directory and how its agreement grew to
results/heal_layers.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbranch.bench.profile import provenance
from specbranch.engines.options import found_model
from specbranch.trace import Answer
from specbranch.train.examples import read_answers, split_of

ROOT = Path(__file__).parents[1]
_LONGEST = 512  # tokens of a text
_TOKENS = 1024  # of a step, at least
_LOOKED_AT = 8  # texts that say which layers do least


@dataclass(frozen=True)
class Text:
    """Tokens; from `border` on the target said them."""

    tokens: list[int]
    border: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a model of Transformers")
    parser.add_argument("model", type=Path, help="directory to write")
    parser.add_argument("--collection", type=Path, nargs="+", required=True)
    parser.add_argument("--layers", type=int, default=16, help="that stay")
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--looks", type=int, default=6, help="at the agreement, on the way")
    parser.add_argument("--count", type=int, default=8, help="answers of each task that judge")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "heal_layers.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    learned: list[Text] = []
    judged: dict[str, list[Answer]] = {}
    for directory in args.collection:
        for task, prompt, answer in read_answers(directory):
            match split_of(prompt):
                case "train":
                    learned += _cut(answer)
                case "test" if len(answer.prompt) <= _LONGEST:
                    judged.setdefault(task, []).append(answer)
    judged = {task: answers[: args.count] for task, answers in judged.items()}
    source = found_model(args.draft)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval().requires_grad_(False)
    num_answered = sum(len(text.tokens) - text.border for text in learned)
    print(f"{len(learned)} texts, {sum(len(text.tokens) for text in learned)} tokens, {num_answered} of the target's")
    agreement = _agreement(whole, judged)
    print("whole", agreement, flush=True)
    influence = _influence(whole, learned[:: len(learned) // _LOOKED_AT])
    kept = sorted(sorted(range(len(influence)), key=lambda layer: -influence[layer])[: args.layers])
    print("layers that stay", kept, flush=True)
    model = _left_with(whole, kept)
    looks = [{"minutes": 0.0, "tokens": 0, "agreement": _agreement(model, judged)}]
    print(looks[-1], flush=True)
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=args.rate)
    order, tokens, spent_s = random.Random(0), 0, 0.0
    with Progress() as bar:
        task_id = bar.add_task("healing", total=60 * args.minutes)
        while spent_s < 60 * args.minutes:
            begin_s = time.monotonic()
            share = spent_s / (60 * args.minutes)
            for group in optimiser.param_groups:
                group["lr"] = args.rate * min(1.0, 0.05 + 20 * share) * (1 + math.cos(math.pi * share)) / 2
            chosen: list[Text] = []
            while sum(len(text.tokens) for text in chosen) < _TOKENS:
                chosen.append(order.choice(learned))
            loss = _learn(model, whole, optimiser, chosen)
            tokens += sum(len(text.tokens) for text in chosen)
            spent_s += time.monotonic() - begin_s
            bar.update(task_id, completed=spent_s)
            if spent_s >= 60 * args.minutes * len(looks) / args.looks:
                looks.append(
                    {"minutes": round(spent_s / 60, 1), "tokens": tokens, "agreement": _agreement(model, judged)}
                )
                print(looks[-1], f"loss {loss:.3f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.model)
    AutoTokenizer.from_pretrained(source).save_pretrained(args.model)
    found = {"draft": Path(args.draft).name, "layers": kept, "rate": args.rate, "whole": agreement, "looks": looks}
    args.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


def _cut(answer: Answer) -> list[Text]:
    """The answer with as much of its prompt as fits, and what is before it as a text of its own."""
    tokens = [*answer.prompt, *answer.tokens]
    begin = max(0, len(tokens) - _LONGEST)
    texts = [Text(tokens[begin:], len(answer.prompt) - begin)]
    before = tokens[max(0, begin - _LONGEST) : begin]
    return texts if len(before) < _LONGEST // 4 else [*texts, Text(before, len(before))]


@torch.inference_mode()
def _influence(model: Any, texts: list[Text]) -> list[float]:
    """By how much each layer turns its input, on the mean (1 - cosine)."""
    found: list[list[float]] = []
    for text in texts:
        states = model.base_model(torch.tensor([text.tokens]), use_cache=False, output_hidden_states=True).hidden_states
        turns = [functional.cosine_similarity(one.float(), two.float(), -1).mean() for one, two in pairwise(states)]
        found.append([1 - float(turn) for turn in turns])
    return [sum(column) / len(column) for column in zip(*found, strict=True)]


def _left_with(whole: Any, kept: list[int]) -> Any:
    """A copy with these layers alone, of which only the layers learn."""
    model = copy.deepcopy(whole).to(torch.float32)
    model.base_model.layers = torch.nn.ModuleList(model.base_model.layers[layer] for layer in kept)
    for index, layer in enumerate(model.base_model.layers):
        layer.self_attn.layer_idx = index
        layer.requires_grad_(True)
    model.config.num_hidden_layers = len(kept)
    model.config.layer_types = [model.config.layer_types[layer] for layer in kept]
    return model


def _learn(model: Any, whole: Any, optimiser: Any, texts: list[Text]) -> float:
    """One step; texts of one batch are padded behind their end, where nothing looks."""
    width = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    is_text, is_asked = torch.zeros(2, len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        is_text[row, : len(text.tokens)] = True
        is_asked[row, text.border - 1 : len(text.tokens) - 1] = True
    head = whole.get_output_embeddings()
    with torch.no_grad():
        wanted = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
        distribution = head(wanted[is_asked]).float().softmax(-1).div_(2)
        said = ids.roll(-1, 1)[is_asked].unsqueeze(1)
        distribution.scatter_add_(1, said, torch.full_like(said, 0.5, dtype=distribution.dtype))
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = head(hidden[is_asked].to(torch.bfloat16))
    apart = (hidden[is_text].float() - wanted[is_text].float()).square().sum(-1)
    loss = (apart / wanted[is_text].float().square().sum(-1)).mean()
    if len(logits):
        loss = loss + functional.cross_entropy(logits.float(), distribution)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach())


@torch.inference_mode()
def _agreement(model: Any, judged: dict[str, list[Answer]]) -> dict[str, float]:
    """How often the first choice is the target's token, by task."""
    model.eval()
    found = {}
    for task, answers in judged.items():
        right = total = 0
        for one in answers:
            ids = torch.tensor([[*one.prompt, *one.tokens]])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(one.prompt) - 1 : -1]
                choices = model.get_output_embeddings()(hidden).argmax(-1)
            right += int((choices == ids[0, len(one.prompt) :]).sum())
            total += len(one.tokens)
        found[task] = round(right / total, 4)
    return found


if __name__ == "__main__":
    main()
