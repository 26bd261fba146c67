"""Popular targets and the drafts that fit them: smaller models of the same family with the same vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pairing:
    """A family of targets, and the drafts for it, the smallest first.

    `pattern` is a regular expression for the names of targets, in lower case. `engine` is what runs the draft.
    `is_compared` says whether the vocabularies were compared by `specbranch doctor`; else they are equal by what is
    public about the family. Without `drafts`, `note` says why there is none.
    """

    targets: str
    pattern: str
    drafts: tuple[str, ...]
    engine: str = "torch or llama.cpp"
    note: str = ""
    is_compared: bool = False


# The first that matches a name counts.
PAIRINGS: Sequence[Pairing] = (
    Pairing("DeepSeek-R1-Distill-Qwen 7B to 32B", r"r1-distill-qwen", ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",)),
    Pairing(
        "DeepSeek-R1-Distill-Llama 8B, 70B", r"r1-distill-llama", ("meta-llama/Llama-3.2-1B-Instruct",),
        note="its chat template differs",
    ),
    Pairing("Qwen2.5-Coder 1.5B to 32B", r"qwen2\.5-coder", ("Qwen/Qwen2.5-Coder-0.5B-Instruct",), is_compared=True),
    Pairing("Qwen2.5 3B to 72B", r"qwen2\.5", ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")),
    Pairing(
        "Qwen3.5 9B to 122B", r"qwen3\.5", ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-2B"), engine="torch",
        note="a hybrid target: refused on a CPU, untested elsewhere",
    ),
    Pairing("Qwen3-Next, Qwen3.6 to 3.8", r"qwen3(-next|\.[6-8])", (), note="these families have no small model"),
    Pairing("Qwen3 4B to 235B, Qwen3-Coder", r"qwen3", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")),
    Pairing(
        "Llama 3.1 8B, 70B, 405B and 3.3 70B", r"llama-3\.[13]",
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    ),
    Pairing("Gemma 3 4B to 27B", r"gemma-3-", ("google/gemma-3-270m-it", "google/gemma-3-1b-it")),
    Pairing("Gemma 2 9B, 27B", r"gemma-2-", ("google/gemma-2-2b-it",)),
    Pairing("Mistral Small 3.x", r"mistral-small-3", ("mistralai/Ministral-3-3B-Instruct-2512",)),
    Pairing("Granite 3.3 8B", r"granite-3\.3", ("ibm-granite/granite-3.3-2b-instruct",)),
    Pairing(
        "Granite 4.0 H", r"granite-4\.0-h", ("ibm-granite/granite-4.0-350m", "ibm-granite/granite-4.0-1b"),
        note="a hybrid target: refused on a CPU, untested elsewhere",
    ),
    Pairing("OLMo 2 7B to 32B", r"olmo-2", ("allenai/OLMo-2-0425-1B-Instruct",), engine="torch"),
    Pairing("EXAONE 4.0 32B", r"exaone-4", ("LGAI-EXAONE/EXAONE-4.0-1.2B",), engine="torch"),
    Pairing("ERNIE 4.5 21B, 300B", r"ernie-4\.5", ("baidu/ERNIE-4.5-0.3B-PT",)),
    Pairing("Hunyuan 4B, 7B", r"hunyuan-", ("tencent/Hunyuan-0.5B-Instruct",)),
    Pairing("gpt-oss-120b", r"gpt-oss-120b", ("openai/gpt-oss-20b",), note="3.6B active weights: for a GPU of its own"),
    Pairing("SmolLM2 360M, 1.7B", r"smollm2-(360m|1\.7b)", ("HuggingFaceTB/SmolLM2-135M-Instruct",)),
    Pairing("Phi-4 14B", r"phi-4(?!-mini)", (), note="Phi-4-mini has another vocabulary"),
)  # fmt: skip


def pairing_for(target: str) -> Pairing | None:
    """Return what is known about drafts for a target, by its name or the name of its directory; None: nothing."""
    name = (Path(target).name or target).lower()
    return next((one for one in PAIRINGS if re.search(one.pattern, name)), None)


def advice_for(target: str) -> str | None:
    """Return a phrase that names the drafts that fit a target, or says that there is none; None if nothing is known."""
    found = pairing_for(target)
    if found is None:
        return None
    if not found.drafts:
        return f"no draft is known for {found.targets}: {found.note}"
    names = " or ".join(found.drafts)
    return f"for {found.targets} take {names}" + (f" ({found.note})" if found.note else "")


def pairs_table() -> str:
    """Return the table of docs/choose.md."""
    lines = ["| target | drafts | engine | vocabularies | notes |", "|---|---|---|---|---|"]
    for one in PAIRINGS:
        drafts = ", ".join(f"`{draft}`" for draft in one.drafts) or "none"
        compared = "compared" if one.is_compared else "by public knowledge" if one.drafts else ""
        lines.append(f"| {one.targets} | {drafts} | {one.engine if one.drafts else ''} | {compared} | {one.note} |")
    return "\n".join(lines)
