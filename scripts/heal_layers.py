#!/usr/bin/env python3
"""A smaller draft: a model without some of its layers, trained for a while on what the target says.

Layers are left out evenly; the rest learns the target's tokens on answers of `specbranch train collect`, of training
prompts only. Writes the model to a directory and how its agreement grew to results/heal_layers.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbranch.bench.profile import provenance
from specbranch.engines.options import local_model
from specbranch.trace import Answer
from specbranch.train.examples import read_answers, split_of

ROOT = Path(__file__).parents[1]
_LONGEST = 384  # tokens of a text
_ANSWERS = 4  # of a step
_NOT_LEARNED = -100  # as torch's cross entropy has it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a model of Transformers")
    parser.add_argument("model", type=Path, help="directory to write")
    parser.add_argument("--collection", type=Path, nargs="+", required=True)
    parser.add_argument("--layers", type=int, default=16, help="that stay")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--looks", type=int, default=5, help="at the agreement, on the way")
    parser.add_argument("--count", type=int, default=6, help="answers of each task that judge")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "heal_layers.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    learned: list[Answer] = []
    judged: dict[str, list[Answer]] = {}
    for directory in args.collection:
        for task, prompt, answer in read_answers(directory):
            if split_of(prompt) == "test":
                judged.setdefault(task, []).append(answer)
            elif len(answer.prompt) + len(answer.tokens) <= _LONGEST:
                learned.append(answer)
    judged = {task: answers[: args.count] for task, answers in judged.items()}
    source = local_model(args.draft) or args.draft
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    whole = _agreement(model, judged)
    print("whole", whole, flush=True)
    _leave_out(model, args.layers)
    looks = [{"minutes": 0.0, "tokens": 0, "agreement": _agreement(model, judged)}]
    print(looks[-1], flush=True)
    frozen = (model.get_input_embeddings(), model.get_output_embeddings())
    for layer in frozen:
        layer.requires_grad_(False)
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=args.rate)
    order, tokens, spent_s = random.Random(0), 0, 0.0
    with Progress() as bar:
        task_id = bar.add_task("healing", total=60 * args.minutes)
        while spent_s < 60 * args.minutes:
            begin_s = time.monotonic()
            share = spent_s / (60 * args.minutes)
            for group in optimiser.param_groups:
                group["lr"] = (
                    args.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2) * min(1.0, share * 20 + 0.1)
                )
            tokens += _learn(model, optimiser, order.sample(learned, _ANSWERS))
            spent_s += time.monotonic() - begin_s
            bar.update(task_id, completed=spent_s)
            if spent_s >= 60 * args.minutes * len(looks) / args.looks:
                looks.append(
                    {"minutes": round(spent_s / 60, 1), "tokens": tokens, "agreement": _agreement(model, judged)}
                )
                print(looks[-1], flush=True)
    model.to(torch.bfloat16).save_pretrained(args.model)
    AutoTokenizer.from_pretrained(source).save_pretrained(args.model)
    found = {"draft": Path(args.draft).name, "layers": args.layers, "rate": args.rate, "whole": whole, "looks": looks}
    args.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


def _leave_out(model: Any, num_kept: int) -> None:
    layers = model.base_model.layers
    last = len(layers) - 1
    kept = [layers[round(place * last / (num_kept - 1))] for place in range(num_kept)]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.base_model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = num_kept
    model.config.layer_types = model.config.layer_types[:num_kept]


def _learn(model: Any, optimiser: Any, answers: list[Answer]) -> int:
    """One step on some answers; returns how many tokens were learned."""
    width = max(len(one.prompt) + len(one.tokens) for one in answers)
    ids = torch.zeros(len(answers), width, dtype=torch.long)
    labels = torch.full((len(answers), width), _NOT_LEARNED)
    for row, one in enumerate(answers):
        end = len(one.prompt) + len(one.tokens)
        ids[row, :end] = torch.tensor([*one.prompt, *one.tokens])
        labels[row, len(one.prompt) : end] = ids[row, len(one.prompt) : end]
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        is_asked = labels[:, 1:] != _NOT_LEARNED
        loss = torch.nn.functional.cross_entropy(
            model.get_output_embeddings()(hidden[is_asked]).float(), labels[:, 1:][is_asked]
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return int(is_asked.sum())


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
