#!/usr/bin/env python3
"""Compare vLLM's answers with and without draft tokens, for a tiny target with recurrent layers; no SpecBranch involved.

studies/12-families/hybrid_target.py     # writes `hybrid_target` in result.json

The proposer knows the right answers, which bare vLLM gave before, and proposes nothing, as many tokens as it may, or a
number that changes from step to step. One token in five is wrong. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specbranch.machine import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUM_TOKENS, MOST = 48, 4
PROMPTS = [[(7 * row + 3 * place) % 90 + 3 for place in range(9 + row)] for row in range(4)]
CASES = ("nothing", "always four", "changing")
FIXED = ", with the fix"
# vLLM takes the buffer of the convolution back as if every step had all its draft tokens. The first `width - 2` columns
# behind the accepted ones and the new tokens are all that the next step can read, so only these are written.
_WRONG = """            keep = B[:, offset + 1 : offset + 1 + (state_len - q_i)]
            new_B = torch.cat([keep, x_seq], dim=-1)
            B.copy_(new_B)
"""
_RIGHT = """            keep = B[:, offset + 1 : offset + width - 1]
            new_B = torch.cat([keep, x_seq], dim=-1)
            B[:, : new_B.shape[1]].copy_(new_B)
"""


class Proposer:
    """Proposes from the answers in a file, in one of the ways in `CASES`."""

    def __init__(self, vllm_config: Any) -> None:
        self._way = os.environ["HYBRID_CASE"].removesuffix(FIXED)
        self._answers = json.loads(Path(os.environ["HYBRID_ANSWERS"]).read_text())
        self._step = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(self, sampled: Any, lengths: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        self._step += 1
        drafts = []
        for row, new in enumerate(sampled):
            text = tokens[row, : lengths[row]].tolist()
            found = next((index for index, prompt in enumerate(PROMPTS) if text[: len(prompt)] == prompt), None)
            if not len(new) or found is None or self._way == "nothing":
                drafts.append([])
                continue
            done = len(text) - len(PROMPTS[found])
            count = MOST if self._way == "always four" else (self._step + row) % (MOST + 1)
            right = (self._answers[found] + [1] * MOST)[done : done + count]
            drafts.append([token if (done + place) % 5 else (token + 1) % 96 for place, token in enumerate(right)])
        return drafts


def apply_fix() -> None:
    """Change the lines of vLLM that take back the state of a convolution, in this process."""
    import inspect

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    function = next(
        one
        for one in vars(gdn_attention).values()
        if inspect.isfunction(one) and one.__module__ == gdn_attention.__name__ and _WRONG in inspect.getsource(one)
    )
    exec(inspect.getsource(function).replace(_WRONG, _RIGHT), vars(gdn_attention))


def answer(model: str, dtype: str, way: str) -> list[list[int]]:
    """Run vLLM in this process, and return its answers to the prompts."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    more: dict[str, Any] = {}
    if way.endswith(FIXED):
        apply_fix()
    if way:
        more["speculative_config"] = {
            "method": "custom_class",
            "model": "hybrid_case.Proposer",
            "num_speculative_tokens": MOST,
        }
    llm = LLM(
        model, dtype=dtype, skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, max_num_seqs=8,
        enable_prefix_caching=False, disable_log_stats=True, **more,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_case(model: Path, dtype: str, way: str, answers: Path) -> dict[str, Any]:
    """Run one case in a process of its own; return the answers, or why there are none."""
    (answers.parent / "hybrid_case.py").write_text(Path(__file__).read_text())
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HYBRID_CASE": way,
        "HYBRID_ANSWERS": str(answers),
        "PYTHONPATH": f"{answers.parent}:{ROOT}:{ROOT / 'src'}",
    }
    command = [sys.executable, __file__, "--child", str(model), dtype, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return {"answers": json.loads(done.stdout.splitlines()[-1])}
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": lines[-1].strip()[-300:] if lines else f"exit code {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "DTYPE", "CASE"), help="run one case in this process")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(answer(*args.child)))
        return
    sys.path.insert(0, str(ROOT))
    from tests.vllm.made_models import write_hybrid, write_pair

    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hybrid = write_hybrid(directory / "hybrid")
        dense, _ = write_pair(directory)
        for label, model, dtype in (
            ("Qwen3-Next", hybrid, "bfloat16"), ("Llama", dense, "float32"),
        ):  # fmt: skip
            answers = directory / "answers.json"
            answers.write_text("[]")
            bare = run_case(model, dtype, "", answers)
            again = run_case(model, dtype, "", answers)
            fixed = [(way + FIXED, None) for way in CASES] if label == "Qwen3-Next" else []
            for way, found in [("bare again", again), *((way, None) for way in CASES), *fixed]:
                row: dict[str, Any] = {"target": label, "dtype": dtype, "drafts": way}
                if "answers" not in bare:
                    row["error"] = bare["error"]
                else:
                    answers.write_text(json.dumps(bare["answers"]))
                    found = found or run_case(model, dtype, way, answers)
                    row |= compared(bare["answers"], found)
                rows.append(row)
                print(row, flush=True)
    import vllm

    document = {"vllm": vllm.__version__, "tokens": NUM_TOKENS, "rows": rows, "provenance": provenance()}
    results = json.loads((HERE / "result.json").read_text())
    (HERE / "result.json").write_text(json.dumps({**results, "hybrid_target": document}, indent=1) + "\n")


def compared(right: list[list[int]], found: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens of each answer are right before the first that differs; None for an answer that is right."""
    if "error" in found:
        return {"error": found["error"]}
    firsts = []
    for expected, said in zip(right, found["answers"], strict=True):
        wrong = [place for place, (a, b) in enumerate(zip(expected, said, strict=True)) if a != b]
        firsts.append(wrong[0] if wrong else None)
    return {"first_wrong": firsts}


if __name__ == "__main__":
    main()
