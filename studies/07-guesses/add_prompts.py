#!/usr/bin/env python
"""Add the prompts to traces that were recorded without: they are rebuilt from the data, and their lengths compared.

studies/07-guesses/add_prompts.py TOKENIZER DATA traces/*.jsonl.gz
"""

import argparse
import gzip
import json
from pathlib import Path

from transformers import AutoTokenizer

from specbranch.bench.scenario import read_prompts

FILES = {"gsm8k": "gsm8k.jsonl", "humaneval": "humaneval.jsonl"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("data", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for path in args.traces:
        with gzip.open(path, "rt") as file:
            header, *records = [json.loads(line) for line in file]
        task = header["task"]
        messages = read_prompts(task, args.data / FILES.get(task, "spec_bench.jsonl"), len(records))
        for record, message in zip(records, messages, strict=True):
            chat = [{"role": "user", "content": message}]
            encoded = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=True)
            prompt = list(encoded["input_ids"])
            if len(prompt) != record.pop("prompt_len", len(prompt)):
                raise SystemExit(f"{path}: the prompt has another length than the recorded one")
            record["prompt"] = prompt
        with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
            for line in (header, *records):
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        print(path, len(records), "prompts")


if __name__ == "__main__":
    main()
