#!/usr/bin/env python
"""Drafts that cannot pay: does the gate keep vLLM as fast as without them, and how soon does it decide?

benchmarks/never_slower.py --out FILE. Three drafts for one target: one that is as large as the target and has to share
its core (slow), one whose head was shuffled, so that it never agrees (wrong), and a good one that is killed in the midst
of an answer and stays away (dies). Bare vLLM and vLLM with drafts answer the same prompts in turns, in short blocks, with
prefilled prompts. A cell is one draft, load, kind of prompts and temperature. The file is written after each cell; cells
that it has already are not measured again. `--table` prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from specbranch.bench.scenario import read_prompts
from specbranch.core.planners import DEFAULT_PLANNER, setting_names
from specbranch.engines.models import resolve_model
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, DecodeResult, PromptRequest, TargetProcess
from specbranch.machine import provenance
from specbranch.plugins.vllm.settings import ProposerSettings

RESULT = Path(__file__).parent / "never-slower.json"
FLOOR = 0.97
GAMMA = 8
PAIRS = ("slow", "wrong", "dies")
LOADS = {1: 64, 4: 64, 16: 40}  # requests at once: tokens of each in a block
KINDS = {"code": ("humaneval", "humaneval.jsonl"), "chat": ("chat", "spec_bench.jsonl")}
KILLED_IN, KILLED_AFTER = 2, 0.4  # the block, and the share of its time
MAX_BLOCKS = 9
_POLL_S = 0.02
_DECISION = re.compile(
    r"with (\S+) requests at once (\S+) tokens/s with the draft model, (\S+) without: the draft model is (on|off)"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One situation."""

    pair: str
    load: int
    kind: str
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.pair}/{self.load}/{self.kind}/{self.temperature:g}"


@dataclass(slots=True)
class Seen:
    """A decision of the gate, as vLLM's log has it."""

    at_s: float  # on the clock of this process
    is_open: bool
    drafted: float
    plain: float


@dataclass(slots=True)
class Block:
    """One run of each engine: tokens per second, and when the gate decided."""

    bare: float
    drafted: float
    decisions: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--data", type=Path, help="directory with humaneval.jsonl and spec_bench.jsonl")
    parser.add_argument("--target", default="smollm2-135m-dense")
    parser.add_argument("--good", default="smollm2-135m", help="the draft that dies")
    parser.add_argument("--weak", default="smollm2-short-dense", help="the draft whose head is shuffled")
    parser.add_argument("--planner", default=DEFAULT_PLANNER)
    parser.add_argument("--blocks", type=int, default=5, help="measured after the decision, at least")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no cell after so many")
    parser.add_argument("--only", default="", help="measure only cells whose name has this in it, e.g. wrong/16")
    parser.add_argument("--table", action="store_true", help="print the table of the kept result")
    args = parser.parse_args()
    if not args.table:
        if args.data is None:
            parser.error("--data is missing: name the directory of the prompts")
        measure_all(args)
    print(table(json.loads(args.out.read_text())))


def cells() -> list[Cell]:
    """Every draft at every load on two kinds of prompts, and sampled at the lowest and the highest load."""
    greedy = [Cell(pair, load, kind, 0.0) for pair in PAIRS for load in LOADS for kind in KINDS]
    sampled = [Cell(pair, load, "code", 1.0) for pair in PAIRS for load in (min(LOADS), max(LOADS))]
    return sorted(greedy + sampled, key=lambda cell: PAIRS.index(cell.pair))


def measure_all(args: argparse.Namespace) -> None:
    """Every cell that the file lacks, as long as there is time."""
    start_s = time.monotonic()
    document: dict[str, Any] = {"cells": {}}
    if args.out.exists():
        document = json.loads(args.out.read_text())
        for kept in document["cells"].values():
            kept.setdefault("commit", document["provenance"]["commit"])
    missing = [cell for cell in cells() if cell.name not in document["cells"] and args.only in cell.name]
    if not missing:
        return
    document |= {"provenance": provenance(), "target": args.target, "planner": args.planner, "floor": FLOOR}
    target_core, draft_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {draft_core})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # the decisions of the gate
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-")))
        targets = {
            name: stack.enter_context(
                TargetProcess(options_of(args.target, settings), directory / f"{name}.log", [target_core])
            )
            for name, settings in (("bare", None), ("drafted", settings_of("none", "ipc:///nowhere", "none")))
        }
        bench = Bench(targets["bare"], targets["drafted"], directory / "drafted.log", args.planner, args.data)
        document["engine"] = targets["bare"].engine.versions
        drafts = {
            "slow": lambda: DraftServiceOptions(args.target, engine="torch", dtype="float32", cores=[target_core]),
            "wrong": lambda: DraftServiceOptions(shuffled(args.weak, directory), engine="torch", cores=[draft_core]),
            "dies": lambda: DraftServiceOptions(args.good, cores=[draft_core]),
        }
        for cell in missing:
            if time.monotonic() - start_s > 60 * args.minutes:
                break
            with DraftProcess(drafts[cell.pair](), directory / "draft.log") as draft:
                blocks = bench.measure(cell, draft, args.blocks)
            found = summary(cell, blocks)
            document["cells"][cell.name] = found | {"commit": document["provenance"]["commit"]}
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(cell.name, json.dumps({name: value for name, value in found.items() if name != "blocks"}), flush=True)


def options_of(model: str, settings: ProposerSettings | None) -> LocalEngineOptions:
    arguments = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": max(LOADS),
        "enforce_eager": True,
        "enable_prefix_caching": True,  # only decoding is compared
        "seed": 0,
    }
    return LocalEngineOptions(model, settings, GAMMA, arguments)


def settings_of(planner: str, address: str, namespace: str) -> ProposerSettings:
    """Only the draft model may draft: the same prompts come again, and past answers would tell the next ones."""
    unused = {name: False for name in ("uses_text", "uses_memory") if name in setting_names(planner)}
    return ProposerSettings(address=address, planner=planner, settings=unused, namespace=namespace)


def shuffled(model: str, directory: Path) -> str:
    """A copy of a model whose head has its rows in another order: as sure as before, and always wrong."""
    out = directory / "shuffled"
    if out.exists():
        return str(out)
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(resolve_model(model))
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    weights["lm_head.weight"] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))].contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return str(out)


@dataclass(slots=True)
class Bench:
    """Two engines on one core, which take turns."""

    bare: TargetProcess
    drafted: TargetProcess
    log_file: Path
    planner: str
    data: Path

    def measure(self, cell: Cell, draft: DraftProcess, num_blocks: int) -> list[Block]:
        """Blocks until so many have followed the decision; a new name gives the cell a gate of its own."""
        settings = settings_of(self.planner, draft.address, cell.name)
        asks = self._asks(cell)
        off = settings_of("none", draft.address, cell.name)
        for engine, chosen in ((self.bare, None), (self.drafted, off)):  # both read the prompts
            engine.run(DecodeJob([replace_tokens(ask, 2) for ask in asks], settings=chosen))
        blocks: list[Block] = []
        while len(blocks) < MAX_BLOCKS and num_settled(cell, blocks) < num_blocks:
            kill_s = None
            if cell.pair == "dies" and len(blocks) == KILLED_IN:
                kill_s = KILLED_AFTER * cell.load * LOADS[cell.load] / blocks[-1].drafted
            blocks.append(self._block(asks, settings, draft, kill_s, is_bare_first=len(blocks) % 2 == 0))
        return blocks

    def _asks(self, cell: Cell) -> list[PromptRequest]:
        task, file = KINDS[cell.kind]
        sampling = {"temperature": cell.temperature, "max_tokens": LOADS[cell.load], "ignore_eos": True}
        return [PromptRequest(text, sampling, is_chat=True) for text in read_prompts(task, self.data / file, cell.load)]

    def _block(
        self,
        asks: list[PromptRequest],
        settings: ProposerSettings,
        draft: DraftProcess,
        kill_s: float | None,
        is_bare_first: bool,
    ) -> Block:
        bare = self.bare.run(DecodeJob(asks)) if is_bare_first else None
        killer = threading.Timer(kill_s or 0.0, draft.kill)
        if kill_s is not None:
            killer.start()
        start_s = time.monotonic()
        with watched(self.log_file) as seen:
            drafted = self.drafted.run(DecodeJob(asks, settings=settings))
        killer.cancel()
        if bare is None:
            bare = self.bare.run(DecodeJob(asks))
        block = Block(speed(bare), speed(drafted))
        for one in seen:
            at_s = one.at_s - start_s
            steps = sum(step_s <= at_s for step_s, _ in drafted.answers[0].steps)
            block.decisions.append(
                {
                    "at_s": round(at_s, 2),
                    "step": steps,
                    "is_open": one.is_open,
                    "drafted": one.drafted,
                    "plain": one.plain,
                }
            )
        return block


def replace_tokens(ask: PromptRequest, max_tokens: int) -> PromptRequest:
    return PromptRequest(ask.prompt, {**ask.sampling, "max_tokens": max_tokens}, is_chat=ask.is_chat)


def speed(done: DecodeResult) -> float:
    """Tokens per second from the first token on."""
    first_s = min(answer.steps[0][0] for answer in done.answers)
    return sum(len(answer.tokens) for answer in done.answers) / (done.elapsed_s - first_s)


@contextlib.contextmanager
def watched(log_file: Path) -> Iterator[list[Seen]]:
    """The gate's decisions in the meantime, each with the time at which the log had it."""
    seen: list[Seen] = []
    is_over = threading.Event()

    def watch(log: TextIO) -> None:
        text = ""
        while True:
            was_over = is_over.wait(_POLL_S)
            text += log.read()
            *lines, text = text.split("\n")
            seen.extend(decisions(lines, time.monotonic()))
            if was_over:
                return

    with log_file.open() as log:
        log.seek(0, os.SEEK_END)
        thread = threading.Thread(target=watch, args=(log,))
        thread.start()
        try:
            yield seen
        finally:
            is_over.set()
            thread.join()


def decisions(lines: Sequence[str], at_s: float) -> list[Seen]:
    """The gate's decisions among lines of vLLM's log."""
    found = (_DECISION.search(line) for line in lines)
    return [Seen(at_s, one[4] == "on", float(one[2]), float(one[3])) for one in found if one]


def first_settled(cell: Cell, blocks: Sequence[Block]) -> int:
    """The first block that begins after the gate has closed, or after the draft has died."""
    if cell.pair == "dies":
        return KILLED_IN + 1
    closed = (index for index, block in enumerate(blocks) if any(not one["is_open"] for one in block.decisions))
    return next(closed, len(blocks) - 1) + 1


def num_settled(cell: Cell, blocks: Sequence[Block]) -> int:
    return max(len(blocks) - first_settled(cell, blocks), 0)


def ratio_of(blocks: Sequence[Block]) -> dict[str, float] | None:
    """The mean ratio of speeds, with its standard error."""
    ratios = [block.drafted / block.bare for block in blocks]
    if len(ratios) < 2:
        return None
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"ratio": round(statistics.fmean(ratios), 4), "error": round(error, 4), "blocks": len(ratios)}


def decided(cell: Cell, blocks: Sequence[Block]) -> dict[str, Any] | None:
    """When the gate first closed, for a draft that dies since the block of its death: steps and seconds of decoding."""
    steps, seconds = 0, 0.0
    first = KILLED_IN if cell.pair == "dies" else 0
    seen = [(index, one) for index, block in enumerate(blocks) for one in block.decisions]
    wanted = [(index, one) for index, one in seen if index >= first and not one["is_open"]]
    if not wanted:
        return None
    index, one = wanted[0]
    for block in blocks[first:index]:
        steps += LOADS[cell.load]
        seconds += cell.load * LOADS[cell.load] / block.drafted
    return {**one, "step": steps + one["step"], "at_s": round(seconds + one["at_s"], 2)}


def summary(cell: Cell, blocks: Sequence[Block]) -> dict[str, Any]:
    """The ratio once decided and over all blocks, and the time until then. `holds`: at the floor within two errors."""
    settled = ratio_of(blocks[first_settled(cell, blocks) :])
    return {
        "settled": settled,
        "all": ratio_of(blocks),
        "holds": settled is not None and settled["ratio"] + 2 * settled["error"] >= FLOOR,
        "decided": decided(cell, blocks),
        "blocks": [[round(block.bare, 2), round(block.drafted, 2), block.decisions] for block in blocks],
    }


def table(document: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "|draft|requests|prompts|temperature|of bare vLLM|with learning|decided after|",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in document["cells"].items():
        when = found["decided"]
        words = f"{when['step']} steps, {when['at_s']:.1f} s: {'on' if when['is_open'] else 'off'}" if when else "-"
        lines.append(f"|{'|'.join(name.split('/'))}|{shown(found['settled'])}|{shown(found['all'])}|{words}|")
    held = sum(found["holds"] for found in document["cells"].values())
    return "\n".join([*lines, "", f"{held} of {len(document['cells'])} cells at {FLOOR} or above, within two errors"])


def shown(found: dict[str, float] | None) -> str:
    return f"{found['ratio']:.3f} ± {found['error']:.3f}" if found else "-"


if __name__ == "__main__":
    main()
