#!/usr/bin/env python
"""Write the planners into docs/reference.md, between two comments: what each does, whose idea it is, and its settings."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from specbranch.core.planner import Settings, describe_setting
from specbranch.core.planners import PLANNERS, settings_type

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- planners: made by scripts/planners.py -->", "<!-- end of planners -->"


@dataclass(frozen=True)
class About:
    """What a planner does, where the idea is from, and when it wins in our tables."""

    does: str
    idea: str
    wins: str


ABOUT = {
    "none": About(
        "The target decodes alone. Nothing is drafted and nothing is submitted. All speeds are measured against it.",
        "Plain decoding.",
        "Where the target's step costs more with every token that it verifies, such as emulated bfloat16 on a CPU, or a full batch; "
        "drafting is then [disabled automatically](how-it-works.md#drafting-stops-where-it-does-not-help).",
    ),
    "sps": About(
        "The draft model drafts `gamma` tokens while the target waits. The target verifies them in one step while the draft model "
        "waits. Both models take turns, so it needs only one device.",
        "Speculative decoding: Leviathan, Kalman and Matias, ICML 2023 ([arXiv 2211.17192](https://arxiv.org/abs/2211.17192)); "
        "Chen et al. 2023 ([arXiv 2302.01318](https://arxiv.org/abs/2302.01318)).",
        "On one device. With a device for each model it is in none of our tables the fastest.",
    ),
    "adaedl": About(
        "Like `sps`, but the draft ends where the entropy of the draft model's distribution predicts a refusal. A bound on the "
        "acceptance probability, 1 - sqrt(`eta` * entropy), is compared with a threshold. The threshold follows the acceptance that "
        "was measured.",
        "AdaEDL: Agrawal, Jeon and Lee, 2024 ([arXiv 2410.18351](https://arxiv.org/abs/2410.18351)).",
        "It is faster than `sps` with one request at a time, where draft tokens are often rejected.",
    ),
    "pearl": About(
        "The draft model goes on drafting one chain while the target verifies the tokens before. If all of them are accepted, the "
        "next `gamma` tokens are ready; if one is rejected, what was drafted after it is discarded. The first token of a window is "
        "verified while the rest of the window is drafted.",
        "PEARL: Liu et al., ICLR 2025 ([arXiv 2408.11850](https://arxiv.org/abs/2408.11850)).",
        "Where the draft is busy with many requests and the ratio c of step times is small: it runs one row in a step "
        "([map](../studies/05-scale/README.md#the-map)).",
    ),
    "ssd": About(
        "While the target verifies, the draft model prepares a draft for each number of accepted tokens, and for several candidates "
        "of the target's own token. Likely numbers get more candidates, by a fixed rule. If the result was not prepared for, the target waits for new draft tokens, "
        "or goes on without (`fallback`).",
        "Speculative speculative decoding, algorithm Saguaro: Kumar, Dao and May, ICLR 2026 "
        "([arXiv 2603.03251](https://arxiv.org/abs/2603.03251)).",
        "Where more sequences in a batch of the draft model cost nearly nothing: it runs 24 of them in a step. In our tables `budget` is faster, which runs the same ones only "
        "where they are likely to be used.",
    ),
    "specbranch": About(
        "A submission ends where the draft model is in doubt (`confidence`), and right there several branches grow while the "
        "target verifies. The less confident the draft model is, the more branches there are. A predictor on the target's hidden "
        "states, H-RAD, may say that none or all tokens of the next window will be accepted.",
        "SpecBranch: Shen et al., ICLR 2026 ([arXiv 2506.01979](https://arxiv.org/abs/2506.01979)). By default the target does not wait "
        "after a result that was not prepared for, and a branch grows only if it is expected to save more time than it takes; `wait_for_draft` without `cost_aware` is [the paper's form](dev/paper.md).",
        "It is faster than `pearl` in most of our tables, with fewer rejected tokens. With one request at a time `budget` is faster; with "
        "many requests it is ahead of `budget` in some cells of the [map](../studies/05-scale/README.md#the-map).",
    ),
    "budget": About(
        "Every token that could be drafted has a probability of being used: the product of calibrated acceptance probabilities on the way "
        "to it. The draft model runs the rows with the highest probabilities, whatever verification result they prepare for, and as many "
        "as are worth their time. Lookup drafts, from the request's own tokens and from past answers, cost no draft step, and a token whose "
        "verification would cost more than it gains is not submitted.",
        "Ours ([study](../studies/02-budget/README.md)). With fixed probabilities it would be SSD, with branches at one position SpecBranch, with expensive "
        "batches PEARL.",
        "With one request at a time it is faster than all other planners here. With many concurrent requests `specbranch` or `pearl` is ahead of it in some cells of "
        "the [map](../studies/05-scale/README.md#the-map). vLLM's `suffix` is as fast on prompts that repeat themselves, and needs no second model "
        "([benchmarks](dev/benchmarks.md)).",
    ),
}


def meanings(settings: type[Settings]) -> dict[str, str]:
    """Return what each setting means, from the docstring of the settings, which has `name`: and then the meaning."""
    text = " ".join((settings.__doc__ or "").split())
    marks = list(re.finditer(r"`(\w+)`: ", text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return {mark[1]: text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def rows(settings: type[Settings]) -> Iterator[str]:
    """Yield a row of a table for each setting."""
    said = meanings(settings)
    for field in fields(settings):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        meaning = said[field.name][:1].upper() + said[field.name][1:]
        yield f"| `{field.name}` | {default} | {describe_setting(settings, field.name)} | {meaning} |"


def planners() -> str:
    """Return the part of the reference: every planner with its settings."""
    lines: list[str] = []
    for name in PLANNERS:
        about, settings = ABOUT[name], settings_type(name)
        lines += ["", f"### {name}", "", about.does, "", f"*Idea:* {about.idea}", "", f"*When it wins:* {about.wins}"]
        if fields(settings):
            lines += ["", "| setting | default | values | meaning |", "|---|---|---|---|", *rows(settings)]
    return "\n".join(lines[1:])


def renewed(text: str) -> str:
    """Return the text of the page with its part made anew; exit if the page lacks the comments around it."""
    if BEGIN not in text or END not in text:
        sys.exit(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{planners()}\n\n{END}{text.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not as it would be written"
    )
    text = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(renewed(text))
    elif text != renewed(text):
        sys.exit("docs/reference.md is not what scripts/planners.py writes; run it")


if __name__ == "__main__":
    main()
