#!/usr/bin/env python3
"""Two ways to read less of a draft's output layer, on answers that were collected, by task.

How many of the target's tokens a layer over frequent tokens would leave out, and how often the first choice of the
screened layer, and of the whole one in 8 bits, is that of the exact one. What is learned is learned from other prompts
than those judged. Answers come from `specbranch train collect`. Writes output_layer.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specbranch.engines.models import local_model
from specbranch.engines.torch.linear import Int8Linear
from specbranch.engines.torch.lm_head import LEARNED, LowRankOutputLayer
from specbranch.hrad.examples import read_answers, split_of
from specbranch.machine import provenance
from specbranch.trace import Answer

HERE = Path(__file__).parent
_LONGEST = 300  # tokens of a text
_AT_ONCE = 4  # rows, as many as go through the narrow product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a model of Transformers")
    parser.add_argument("--collection", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8, help="answers of each task")
    parser.add_argument("--lowest", type=int, default=32_000, help="token ids that count as frequent")
    parser.add_argument("--out", type=Path, default=HERE / "output_layer.json")
    args = parser.parse_args()
    learned: list[Answer] = []
    judged: dict[str, list[Answer]] = {}
    for task, prompt, answer in read_answers(args.collection):
        match split_of(prompt):
            case "train":
                learned.append(answer)
            case "test":
                judged.setdefault(task, []).append(answer)
    shown = {token for answer in learned for token in (*answer.prompt, *answer.tokens)}
    model = AutoModelForCausalLM.from_pretrained(local_model(args.draft) or args.draft, dtype=torch.float32).eval()
    head = LowRankOutputLayer(model.get_output_embeddings(), Int8Linear)
    for answer in learned[:: max(1, len(learned) * 100 // LEARNED)]:
        head.observe(_hidden(model, answer))
    if not head.is_narrow:
        parser.error(f"{args.collection} has too few answers to learn from; {LEARNED} tokens are needed")
    tasks = {}
    for task, answers in judged.items():
        hidden = torch.cat([_hidden(model, one)[len(one.prompt) - 1 :] for one in answers[: args.count]])
        tasks[task] = {**_first_choices(head, model, hidden), **_left_out(answers, shown, args.lowest)}
        print(task, tasks[task], flush=True)
    traffic = sum(len(answer.prompt) + len(answer.tokens) for answer in learned)
    found = {"draft": Path(args.draft).name, "lowest": args.lowest, "traffic": traffic, "tasks": tasks}
    args.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


@torch.inference_mode()
def _hidden(model: Any, answer: Answer) -> torch.Tensor:
    ids = torch.tensor([[*answer.prompt, *answer.tokens[:-1]][:_LONGEST]])
    hidden: torch.Tensor = model.base_model(input_ids=ids).last_hidden_state[0]
    return hidden


@torch.inference_mode()
def _first_choices(head: LowRankOutputLayer, model: Any, hidden: torch.Tensor) -> dict[str, float]:
    """Shares of positions where a layer's first choice is the exact one's."""
    exact = torch.cat([model.get_output_embeddings()(part).argmax(-1) for part in hidden.split(64)])
    screened = torch.cat([head(part).argmax(-1) for part in hidden.split(_AT_ONCE)])
    whole = torch.cat([head(part).argmax(-1) for part in hidden.split(64)])
    return {
        "positions": len(hidden),
        "screened": round((screened == exact).float().mean().item(), 4),
        "whole_8_bits": round((whole == exact).float().mean().item(), 4),
    }


def _left_out(answers: list[Answer], shown: set[int], lowest: int) -> dict[str, float]:
    """The share of the target's tokens that are neither among the lowest ids nor were shown by traffic."""
    tokens = [token for answer in answers for token in answer.tokens]
    return {
        "tokens": len(tokens),
        "left_out": round(sum(t >= lowest and t not in shown for t in tokens) / len(tokens), 4),
    }


if __name__ == "__main__":
    main()
