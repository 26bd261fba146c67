"""The same answer without drafts: on all the cores that target and draft share, so that both had equal hardware."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from specbranch.cli.answer import Answer
from specbranch.cli.painter import Run
from specbranch.cli.pair import PairOptions
from specbranch.cli.progress import Progress
from specbranch.launch import vllm_worker
from specbranch.launch.vllm_engine import Piece, TargetOptions
from specbranch.launch.vllm_worker import TargetProcess
from specbranch.plugins.vllm import installed

_WARM_TOKENS = 4


def shared_cores(options: PairOptions) -> tuple[int, ...] | None:
    """Return the cores that target and draft divide among themselves; None if the draft takes none of the target's."""
    cores = options.cores()
    if not installed.runs_on_cpu() or not cores.target or not cores.draft:
        return None
    return tuple(sorted({*cores.target, *cores.draft}))


def answer_alone(
    options: PairOptions, cores: Sequence[int], prompt: Sequence[int], sampling: Mapping[str, Any]
) -> Answer:
    """Load vLLM without a draft in a process of its own, on `cores`, let it answer, and stop it."""
    ask = vllm_worker.Ask("", dict(sampling), tokens=list(prompt))
    warm_up = vllm_worker.Ask("", {**sampling, "max_tokens": _WARM_TOKENS}, tokens=list(prompt))
    how = TargetOptions(options.target, None, arguments=options.vllm_arguments())
    with tempfile.TemporaryDirectory(prefix="specbranch-log-") as directory, Progress() as progress:
        progress.show(f"loading {options.target} without a draft, on {describe(cores)}")
        with TargetProcess(how, Path(directory) / "load.log", cores) as target:
            progress.show(f"answering without drafts, on {describe(cores)}")
            target.run(vllm_worker.Run([warm_up]))
            (said,) = target.run(vllm_worker.Run([ask])).answers
    return _as_answer(said)


def describe(cores: Sequence[int]) -> str:
    """Name a set of cores."""
    return f"core {cores[0]}" if len(cores) == 1 else f"cores {','.join(str(core) for core in cores)}"


def compare_answers(answer: Answer, plain: Answer) -> dict[str, Any]:
    """Compare two answers: speed, and how many tokens are equal."""
    tokens = zip(answer.tokens, plain.tokens, strict=False)
    return {
        "speedup": answer.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
        "is_equal": answer.tokens == plain.tokens,
        "num_equal_tokens": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens)),
    }


def comparison_line(answer: Answer, plain: Answer, cores: Sequence[int] | None, is_greedy: bool) -> str:
    """Say in one line what the comparison found, and on which cores the answer without drafts was made."""
    found = compare_answers(answer, plain)
    place = f" on the same {describe(cores)}" if cores else ""
    line = f"without drafts{place} {plain.tokens_per_s:.1f} tokens/s, with drafts {answer.tokens_per_s:.1f}"
    if found["speedup"] is not None:
        line += f": {found['speedup']:.2f}x"
    if not is_greedy:
        return f"{line}; sampled answers are not compared"
    if found["is_equal"]:
        return f"{line}; both answers are equal"
    where = f"{line}; the answers differ after {found['num_equal_tokens']} equal tokens"
    return f"{where} (nearly equally likely tokens may swap by rounding; --dtype float32 makes that very rare)"


def _as_answer(said: vllm_worker.Answer) -> Answer:
    """Turn what a target's process reports of an answer into one that was followed step by step."""
    answer, begin = Answer(asked_s=0.0), 0
    for (at_s, num_tokens), text in zip(said.steps, said.texts, strict=True):
        tokens = said.tokens[begin : begin + num_tokens]
        begin += num_tokens
        reason = said.finish_reason if begin == len(said.tokens) else None
        piece = Piece(index=0, tokens=tokens, text=text, finish_reason=reason, at_s=at_s)
        answer.take(piece, [Run(text, False)] if text else [])
    return answer
