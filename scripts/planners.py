#!/usr/bin/env python
"""Write docs/planners.md: each planner, whose idea it is, and its settings, as their classes have them."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from specbranch.core.node import Node
from specbranch.core.planner import Settings, describe_setting
from specbranch.core.planners import DEFAULT_PLANNER, PLANNERS, settings_type
from specbranch.core.round import Round
from specbranch.core.tree import Tree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planners.md"


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
        "the gate then switches drafts off by itself.",
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
        "Over `sps` with one request at a time, where drafts are often refused.",
    ),
    "pearl": About(
        "The draft model goes on drafting one chain while the target verifies the tokens before. If all of them are accepted, the "
        "next `gamma` tokens are ready; if one is refused, what was drafted after it is lost. The first token of a window is "
        "verified while the rest of the window is drafted.",
        "PEARL: Liu et al., ICLR 2025 ([arXiv 2408.11850](https://arxiv.org/abs/2408.11850)).",
        "Where the draft is busy with many requests and the ratio c of step times is small: it runs one row in a step "
        "([map](../studies/05-scale/README.md#the-map)).",
    ),
    "ssd": About(
        "While the target verifies, the draft model prepares a draft for each number of accepted tokens, and for several candidates "
        "of the target's own token. Likely numbers get more candidates, by a fixed rule. On a miss the target waits for a new draft, or "
        "goes on without (`fallback`).",
        "Speculative speculative decoding, algorithm Saguaro: Kumar, Dao and May, ICLR 2026 "
        "([arXiv 2603.03251](https://arxiv.org/abs/2603.03251)).",
        "Where rows are nearly free: it runs 24 of them in a step. In our tables `budget` is faster, which runs the same rows only "
        "where they are likely to be used.",
    ),
    "specbranch": About(
        "A submission ends where the draft model is in doubt (`confidence`), and right there several branches grow while the "
        "target verifies. The less confident the draft model is, the more branches there are. A predictor on the target's hidden "
        "states, H-RAD, may say that none or all tokens of the next window will be accepted.",
        "SpecBranch: Shen et al., ICLR 2026 ([arXiv 2506.01979](https://arxiv.org/abs/2506.01979)). By default the target does not wait "
        "after a miss, and only branches that pay for their time grow; `wait_for_draft` without `cost_aware` is [the paper's form](paper.md).",
        "Over `pearl` in most of our tables, and with fewer refused tokens. With one request at a time `budget` is faster; with many it is "
        "ahead of `budget` in some cells of the [map](../studies/05-scale/README.md#the-map).",
    ),
    "budget": About(
        "Every token that could be drafted has a probability of being used: the product of calibrated acceptance probabilities on the way "
        "to it. The draft model runs the rows with the highest probabilities, whatever verdict they prepare for, and as many "
        "as are worth their time. N-gram guesses from the text and from past answers cost no draft step, and a token whose "
        "verification would cost more than it gains is not submitted.",
        "Ours ([study](../studies/02-budget/README.md)). Fixed probabilities would make it SSD, branches at one position SpecBranch, and expensive "
        "rows PEARL.",
        "With one request at a time over all other planners here. With many requests at once `specbranch` or `pearl` is ahead of it in some cells of "
        "the [map](../studies/05-scale/README.md#the-map). vLLM's `suffix` is as fast on text that repeats, and needs no second model "
        "([benchmarks](benchmarks.md)).",
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
    "is_hit": "Whether the draft model had computed its distribution after the last verdict's own token before that verdict.",
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


OWN = """## A planner of your own

A class in [thirty lines](../examples/extension/README.md). One object serves one sequence, so it may keep what it likes. Its methods are called
between steps and must return within microseconds:

- `submit(round)` after every verdict: the chain of nodes below the root to verify now, or None to let the target wait; then it is called
  again after every draft step. After the deadline the target goes on with what there is.
- `rows_to_run(round)` before every draft step: the nodes whose distributions the draft model should compute, most valuable first. To
  compute a node's distribution is to *run* it; tokens after it can be drawn then. A node that has run is not to be named again.
- `learn(round, verdict)` with every verdict, before the tree's root moves. By default it does nothing.

What they may ask, all of it without side effects but that `chain`, `children` and `next_unrun` draw tokens where distributions are known:

| name | |
|---|---|
{table}

Three branches where a submission ends, each `depth` tokens long:

```python
def rows_to_run(self, round):
    tree = round.tree
    if tree.end.distribution is None:
        return [tree.end]
    tips = [tree.next_unrun(branch, self.settings.depth) for branch in tree.children(tree.end, 3)]
    return [tip for tip in tips if tip]
```"""


def page() -> str:
    """Return the page."""
    lines = [
        "# Planners",
        "",
        "    specbranch serve TARGET --draft DRAFT --planner specbranch --set confidence=0.4",
        "    specbranch simulate --planners pearl,specbranch,budget --sweep specbranch.confidence=0.1:0.9:0.2",
        "",
        "A planner decides for each request what is drafted and what is submitted for verification, never what is accepted. "
        f"The default is [`{DEFAULT_PLANNER}`](#{DEFAULT_PLANNER}). [A planner of your own](#a-planner-of-your-own) takes thirty lines.",
        "",
        "This page is made by `scripts/planners.py` from the settings classes. Speeds: [simulated on the paper's pairs](paper.md), "
        "[on real engines](benchmarks.md#every-planner-four-tasks).",
    ]
    for name in PLANNERS:
        about, settings = ABOUT[name], settings_type(name)
        lines += ["", f"## {name}", "", about.does, "", f"*Idea:* {about.idea}", "", f"*When it wins:* {about.wins}"]
        if fields(settings):
            lines += ["", "| setting | default | values | meaning |", "|---|---|---|---|", *rows(settings)]
    return "\n".join([*lines, "", OWN.format(table="\n".join(asked()))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not as it would be written"
    )
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/planners.md is not what scripts/planners.py writes; run it")


if __name__ == "__main__":
    main()
