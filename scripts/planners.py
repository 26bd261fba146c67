#!/usr/bin/env python
"""Write what the docs say of planners, from their classes: each planner with its settings in docs/reference.md, and the names that a
planner may use in docs/extend.md. Each part stands between two comments of its page."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from specbranch.core.node import Node
from specbranch.core.planner import Settings, describe_setting
from specbranch.core.planners import PLANNERS, settings_type
from specbranch.core.round import Round
from specbranch.core.tree import Tree

DOCS = Path(__file__).resolve().parents[1] / "docs"


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


# What planners may ask of these classes.
ASKED = {
    Round: ("is_hit", "is_waiting", "tree", "costs"),
    Tree: ("root", "end", "chain", "children", "next_unrun", "path_prob"),
    Node: ("token", "position", "parent", "children", "distribution"),
}
SAID = {  # of fields, which have no docstrings
    "tree": "The drafted tokens that may follow the last committed token.",
    "costs": "What was learned of both models: step times, and how often the draft model is right.",
    "is_hit": "Whether the draft model had computed its distribution after the target's own token before the verification ended.",
    "root": "The last committed token.",
    "token": "Its token id.",
    "position": "Its index in the whole sequence, prompt included.",
    "parent": "The node before it.",
    "children": "The tokens that were drawn after it, most likely first.",
    "distribution": "The draft model's distribution of the token after it; None until the node was run.",
}


def asked() -> Iterator[str]:
    """Yield a row of a table for each name that planners may use."""
    for owner, names in ASKED.items():
        for name in names:
            found = inspect.getattr_static(owner, name, None)
            said, call = SAID.get(name, ""), ""
            if isinstance(found, property):
                said = found.__doc__ or ""
            elif inspect.isfunction(found):
                said = found.__doc__ or ""
                call = f"({', '.join(list(inspect.signature(found).parameters)[1:])})"
            yield f"| `{owner.__name__.lower()}.{name}{call}` | {' '.join(said.split())} |"


def planners() -> str:
    """Return the part of the reference: every planner with its settings."""
    lines: list[str] = []
    for name in PLANNERS:
        about, settings = ABOUT[name], settings_type(name)
        lines += ["", f"### {name}", "", about.does, "", f"*Idea:* {about.idea}", "", f"*When it wins:* {about.wins}"]
        if fields(settings):
            lines += ["", "| setting | default | values | meaning |", "|---|---|---|---|", *rows(settings)]
    return "\n".join(lines[1:])


def names() -> str:
    """Return the table of the names that a planner may use."""
    return "\n".join(["| name | meaning |", "|---|---|", *asked()])


# By page: the comments before and after the part, and what makes it.
PARTS: Mapping[str, tuple[str, str, Callable[[], str]]] = {
    "reference.md": ("<!-- planners: made by scripts/planners.py -->", "<!-- end of planners -->", planners),
    "extend.md": ("<!-- names: made by scripts/planners.py -->", "<!-- end of names -->", names),
}


def renewed(page: str) -> str:
    """Return the text of a page with its part made anew; exit if the page lacks the comments around it."""
    begin, end, make = PARTS[page]
    text = (DOCS / page).read_text()
    if begin not in text or end not in text:
        sys.exit(f"docs/{page} lacks the lines {begin} and {end}")
    return f"{text.partition(begin)[0]}{begin}\n\n{make()}\n\n{end}{text.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is not as it would be written"
    )
    is_check = parser.parse_args().check
    for page in PARTS:
        if not is_check:
            (DOCS / page).write_text(renewed(page))
        elif (DOCS / page).read_text() != renewed(page):
            sys.exit(f"docs/{page} is not what scripts/planners.py writes; run it")


if __name__ == "__main__":
    main()
