#!/usr/bin/env python3
"""Record a trace: what the target said, and the draft's distribution before each of those tokens.

The target answers a batch of prompts; the draft is then teacher-forced over the answers, so every distribution stands on the
true text. Needs torch and transformers. The output is the format that `specbranch simulate --trace` reads.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbranch.bench.prompts import TASKS, read_prompts


@torch.inference_mode()
def answers(
    model: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace
) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, answer tokens) of each prompt; an answer ends with its own end token or at the limit."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in prompts
    ]
    found = []
    for start in range(0, len(texts), args.batch):
        batch = tokenizer(texts[start : start + args.batch], return_tensors="pt", padding=True)
        sampling = (
            {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
            if args.temperature
            else {"do_sample": False}
        )
        out = model.generate(**batch, max_new_tokens=args.max_new_tokens, repetition_penalty=1.0, **sampling)
        for ids, mask, full in zip(batch.input_ids, batch.attention_mask, out, strict=True):
            answer = full[ids.shape[0] :].tolist()
            ends = [i for i, token in enumerate(answer) if token == tokenizer.eos_token_id]
            found.append((ids[mask.bool()].tolist(), answer[: ends[0] + 1] if ends else answer))
        print(f"answered {min(start + args.batch, len(texts))}/{len(texts)}", file=sys.stderr)
    return found


@torch.inference_mode()
def heads(model: Any, prompt: list[int], answer: list[int], top_k: int) -> tuple[list[Any], list[float]]:
    """The draft's distribution before each answer token: its head as [ids, probabilities], and its entropy in nats."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    logs = torch.log_softmax(logits.float(), dim=-1)  # [answer, vocab]
    probs = logs.exp()
    top = probs.topk(top_k, dim=-1)
    entropy = -(probs * logs).sum(dim=-1)
    distributions = [
        [ids, [round(p, 5) for p in ps]] for ids, ps in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return distributions, [round(h, 4) for h in entropy.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of the target's dense weights")
    parser.add_argument("--draft", type=Path, required=True, help="directory of the draft's dense weights")
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of the task's prompts")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--head-len", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    pairs = answers(target, tokenizer, read_prompts(args.task, args.prompts, args.count), args)
    del target
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.bfloat16)

    header = {
        "format": "specbranch-trace",
        "version": 1,
        "target": args.target.name,
        "draft": args.draft.name,
        "task": args.task,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "dtype": "bfloat16",
        "recorder": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
    }
    # mtime=0: the same trace gives the same bytes.
    with args.out.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as sink:
        sink.write(json.dumps(header).encode() + b"\n")
        for prompt, answer in pairs:
            distributions, entropy = heads(draft, prompt, answer, args.top_k)
            record = {"prompt_len": len(prompt), "tokens": answer, "heads": distributions, "entropy": entropy}
            sink.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    main()
