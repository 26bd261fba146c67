"""Prove in ten minutes what only a GPU can prove, and write one report; `scripts/gpu-proof` starts this.

`tests/vllm` runs a reduced form on a CPU. `plan` lists the stages, `stages` runs one in its time, `decode` is the
program of those that need vLLM, and `report` makes one file of what they found.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbranch.cli.console import ProgressBar
from specbranch.cli.options import parse_key_values
from specbranch.launch.placement import divide_cores
from specbranch.machine import num_gpus, provenance
from tests.proof import report
from tests.proof.plan import Proof
from tests.proof.stages import Outcome, carry_out

_PACKAGES = ("torch", "vllm", "transformers", "flashinfer-python", "triton", "llama-cpp-python")
_GPU_FIELDS = "name,memory.total,driver_version,compute_cap"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-proof", description="What only a GPU can prove, in one report.")
    parser.add_argument("target", help="a path or a name on the hub; at most 8B for ten minutes")
    parser.add_argument("draft", help="a dense model with the target's vocabulary")
    parser.add_argument("--eagle", metavar="HEAD", help="an EAGLE head of the target, to compare with")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything; default: 10")
    parser.add_argument("--vllm-arg", action="append", metavar="NAME=VALUE", help="passed to vllm.LLM; repeatable")
    parser.add_argument("--out", type=Path, default=Path("gpu-proof.md"), help="the report; default: gpu-proof.md")
    parser.add_argument("--reduced", action="store_true", help="a few prompts, also without a GPU: a test of the proof")
    args = parser.parse_args()
    if not num_gpus() and not args.reduced:
        parser.error("no GPU was found here; --reduced runs a small form of the proof on the CPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    cores = None if num_gpus() else divide_cores("cpu")
    proof = Proof(
        target=args.target,
        draft=args.draft,
        num_gpus=num_gpus(),
        is_reduced=args.reduced,
        minutes=args.minutes,
        eagle=args.eagle,
        arguments=parse_key_values("--vllm-arg", args.vllm_arg),
        target_cores=cores.target if cores else None,
        draft_cores=cores.draft if cores else None,
    )
    outcomes, equality = run(proof, args.out)
    print(f"wrote {args.out.resolve()}; read it, and send it back")
    return int(not equality["holds"] or any(outcome.ending != "passed" for outcome in outcomes))


def run(proof: Proof, out: Path) -> tuple[list[Outcome], dict[str, Any]]:
    """Run all stages in order and write the report after each, so that an interruption loses little."""
    about = {"provenance": provenance(), "proof": asdict(proof), "gpus": gpus(), "packages": packages()}
    end_s = time.monotonic() + 60 * proof.minutes
    stages, outcomes = proof.stages(), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="specbranch-proof-") as name, ProgressBar() as progress:
        for number, stage in enumerate(stages, start=1):
            progress.show(f"{number} of {len(stages)}: {stage.name}, at most {stage.most_s:.0f} s")
            outcome = carry_out(stage, Path(name) / str(number), end_s - time.monotonic())
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.ending} in {outcome.took_s:.0f} s", flush=True)
            equality = report.judge(outcomes)
            document = {
                "summary": report.summary(outcomes, equality),
                **about,
                "equality": equality,
                "stages": [one.as_json() for one in outcomes],
            }
            out.write_text(report.text(document))
    print(document["summary"])
    return outcomes, equality


def gpus() -> list[str]:
    """List the GPUs by Nvidia's own tool; return an empty list where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that matter here."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
