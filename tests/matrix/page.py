"""docs/dev/releases.md: which releases of vLLM work, from the result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbranch.core.planners import PLANNERS
from tests.matrix.runs import RUNS, read_results

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "releases.md"

_INTRO = """# Which vLLM releases work

vLLM {first} to {last}, each tested with the same code. All need torch {torch}, so one environment serves them all: each
vLLM is installed into a directory of its own, and `PYTHONPATH` chooses. `scripts/matrix` runs it; the figures are in
`benchmarks/matrix.jsonl`.

"""
_REST = """
Counts are of equal outputs, with the proposer and without. Every run was on the CPU in float32; the drafts are the
target itself in another number format. GPUs are not tested.

| column | test in `tests/vllm` | what is run |
|---|---|---|
| greedy | `test_equality.py` | 16 prompts at once, {planners} planners: the worst one; drafts of all |
| server | `test_serve.py` | `specbranch serve`: 16 requests at once, an answer by a JSON schema, the end by SIGTERM |
| `check` | `test_check.py` | `specbranch check --quick` with 16 samples: checks that hold and fail |
| H-RAD | `test_features.py` | positions whose features were compared with Transformers, and features that were missed |

## What differs

- **H-RAD.** Before 0.32 a step without drafts has no `spec_decode_metadata`. We take that as zero drafts in every row.
- **The start on the CPU.** Until 0.30 the runner makes the proposer first and puts the CPU's kernels in place later. So
  the workarounds for vLLM's sampler wait until the model is loaded.
- **0.30 on the CPU.** vLLM cannot verify any draft there: its sampler holds Triton's kernels and ends with `Cannot
  inspect kernel parameters`. The proposer gives it vLLM's own kernels for the CPU.
- **Sampling on the CPU.** [Two more faults](../check.md#faults-that-it-found-in-vllm) are in all five releases. A
  crash on top-k needs a step without drafts that reaches the sampler; by reading, only 0.32 has such steps. There it
  also draws a random number for each sampled row and token id, which nothing reads: with the draft model off, 16
  sampled requests ran at 0.85 of bare vLLM on a CPU (SmolLM2-135M, 49,152 token ids). We leave that out.
- **Packages.** 0.31 needs transformers before 5.18 and xgrammar 0.2.7; 0.32 needs xgrammar 0.2.8.

Where the proposer finds a fault it says in the log that it works around it. Outside these releases it warns.

## A new release

    scripts/contract WHEEL             # seconds: has it the names that we rely on? Nothing of it is run
    scripts/matrix X.Y.Z               # minutes: the table above, for this release
    scripts/matrix --page              # this page

The names are those that `plugins/vllm/compat.py` reads, how vLLM calls the hook, flags, variables and metrics
(`tests/contract/names.py`). CI reads all five releases so. Names say nothing about behaviour: the faults above are in
releases that have every name.
"""


def text(lines: dict[str, dict[str, Any]]) -> str:
    """Make the page from what is known of each release."""
    first, *_, last = [_series(release) for release in lines]
    equality = next(iter(lines.values()))["runs"]["equality"]
    head = "| vLLM | greedy | server | `check` | H-RAD | replaced on the CPU |\n|---|---|---|---|---|---|\n"
    rows = "".join(_row(release, line["runs"]) for release, line in lines.items())
    intro = _INTRO.format(first=first, last=last, torch=equality["torch"].partition("+")[0])
    return intro + head + rows + _source(lines) + _REST.format(planners=len(_planners(equality)))


def write() -> None:
    """Write the page from the result file."""
    PAGE.write_text(text(read_results()))


def _row(release: str, runs: dict[str, Any]) -> str:
    shown = [_CELLS[run.name](runs[run.name]) if run.name in runs else "not run" for run in RUNS]
    marks = ["" if runs.get(run.name, {"passed": True})["passed"] else "**failed** " for run in RUNS]
    by_name = {run.name: mark + cell for run, mark, cell in zip(RUNS, marks, shown, strict=True)}
    columns = ("equality", "server", "check", "features", "sampler")
    return f"| {release} | {' | '.join(by_name[name] for name in columns)} |\n"


def _source(lines: dict[str, dict[str, Any]]) -> str:
    source = next(iter(lines.values()))["provenance"]
    commits = sorted({run["commit"] for line in lines.values() for run in line["runs"].values()})
    minutes = sum(run["took_s"] for line in lines.values() for run in line["runs"].values()) / 60
    return f"\n*{source['cpu']}, {source['num_cores']} cores; {minutes:.0f} minutes; commit {', '.join(commits)}.*\n"


def _planners(run: dict[str, Any]) -> list[str]:
    """List the planners that were run: a planner made later is not in an older result."""
    return [name for name in PLANNERS if f"equal_{name}" in run]


def _equality(run: dict[str, Any]) -> str:
    least = min(run[f"equal_{name}"] for name in _planners(run))
    return f"{least} of {run['prompts']}, {run['accepted']:.0f} accepted"


def _server(run: dict[str, Any]) -> str:
    return f"{run['equal']} of {run['prompts']}, {run['accepted']:.0f} accepted"


def _check(run: dict[str, Any]) -> str:
    return f"{run['holds']} hold, {run['failed']} fail"


def _features(run: dict[str, Any]) -> str:
    num_missed = run["hint_faults"] if "hint_faults" in run else run["outlook_faults"]  # its name in older results
    return f"{run['compared']} equal, {num_missed} missed"


def _sampler(run: dict[str, Any]) -> str:
    names = run["replaced"].split(", ")
    kernels = [name for name in names if name.endswith("_kernel")]
    functions = [f"`{name}`" for name in names if name not in kernels]
    return ", ".join([*([f"{len(kernels)} kernels"] if kernels else []), *functions])


_CELLS = {"equality": _equality, "server": _server, "check": _check, "features": _features, "sampler": _sampler}


def _series(release: str) -> str:
    return release.rpartition(".")[0]
