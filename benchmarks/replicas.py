#!/usr/bin/env python
"""What draft services for many vLLM servers need, by arithmetic on results that are in this repository.

benchmarks/replicas.py [--targets 1000] [--steps-per-second 10] [--cache-gb 2]

Nothing is measured here. Speeds are pool.json's, simulated for 64 targets with one request each, whose step takes six draft
steps; so the draft step must be a sixth of the target's. How many cores that takes follows from a step measured on
one core, and from how steps shrink with cores, which is assumed as in studies/05-scale/placement.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONNECTIONS = 2  # of one vLLM server to each service that it names, counted by `scripts/images`: worker and metrics
NAMED = 4  # services of a pool that a target names
POWERS = (1.0, 0.42)  # a step on n cores takes n ** -power: nothing is shared; two cores of the test machine


@dataclass(frozen=True, slots=True)
class Figures:
    """What the result files say."""

    draft_step_s: float  # one row on one core
    row_costs: tuple[float, float]  # of one more row, by that of the first: in 8 bits, and in llama.cpp's 4 bits
    weights_gb: float
    process_gb: float  # of a draft service under load; its small model and its cache are in it
    speeds: dict[str, dict[int, float]]  # by the cost of a row, by targets per service
    draft_steps: float  # in one step of the target
    answers: float  # of the service, for each message of a target
    messages_per_s: float  # that one service was seen to take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=1000, metavar="N", help="vLLM servers [1000]")
    parser.add_argument("--steps-per-second", type=float, default=10.0, metavar="N", help="of each target [10]")
    parser.add_argument("--cache-gb", type=float, default=2.0, metavar="GB", help="KV cache of each service [2]")
    args = parser.parse_args()
    print("\n".join(table(args.targets, args.steps_per_second, args.cache_gb)))


def read_figures() -> Figures:
    pool, load, attacks = (read(f"benchmarks/{name}.json") for name in ("pool", "load", "attacks"))
    profiles = [
        json.loads(line) for line in (ROOT / "studies" / "04-draft-row" / "profile.jsonl").read_text().splitlines()
    ]
    # The later lines, in turns on one machine, say which commit they are of.
    own = [one for one in profiles if "commit" in one["provenance"]]
    int8 = [one for one in own if one.get("dtype") == "int8"]
    gguf = [one for one in own if one["engine"] == "llamacpp"]
    simulated = pool["simulated"]
    tenants = next(one for one in attacks["attacks"] if one["attack"] == "tenants")
    return Figures(
        draft_step_s=step_ms(int8, 1) / 1e3,
        row_costs=(row_cost(int8), row_cost(gguf)),
        weights_gb=int8[0]["weight_bytes"] / 1e9,
        process_gb=load["memory"]["parts"]["draft"]["last_mb"] / 1e3,
        speeds={
            cost: {simulated["targets"] // int(services): one["speedup"] for services, one in by_services.items()}
            for cost, by_services in simulated["row_costs"].items()
        },
        draft_steps=simulated["c"],
        answers=pool["counts"]["answered"] / pool["counts"]["calls"],
        messages_per_s=tenants["messages"] / attacks["attack_s"],
    )


def read(name: str) -> Any:
    return json.loads((ROOT / name).read_text())


def step_ms(profiles: list[dict[str, Any]], rows: int) -> float:
    return median(one["rows"][str(rows)]["median_ms"] for one in profiles)


def row_cost(profiles: list[dict[str, Any]]) -> float:
    """What a further row costs, by the first, on the way to eight."""
    return (step_ms(profiles, 8) / step_ms(profiles, 1) - 1) / 7


def cores_for(figures: Figures, steps_per_s: float, power: float) -> int:
    """The cores of a service whose draft step is as short as the simulated one, for targets of that many steps a second."""
    needed_s = 1 / steps_per_s / figures.draft_steps
    return max(1, math.ceil(round((figures.draft_step_s / needed_s) ** (1 / power), 6)))


def table(targets: int = 1000, steps_per_s: float = 10.0, cache_gb: float = 2.0) -> Iterator[str]:
    """Lines of Markdown: what the services need by how many targets share one, then where the figures come from."""
    figures = read_figures()
    low, high = (cores_for(figures, steps_per_s, power) for power in POWERS)
    cheap, dear = figures.speeds
    memory_gb = figures.weights_gb + figures.process_gb + cache_gb
    per_target = steps_per_s * (1 + figures.answers + figures.draft_steps)
    yield f"| targets of a service | speed, a row at {float(cheap):.0%} or {float(dear):.0%} | services | cores | memory, GB | connections of a service, on each node or in a pool | messages a second, at most: of a service, of all |"
    yield "|---|---|---|---|---|---|---|"
    for share in sorted(figures.speeds[cheap]):
        if share == 64 // 7:
            continue  # seven services of eight: that one of them is out
        services = math.ceil(targets / share)
        speeds = f"{figures.speeds[cheap][share]:.1f} or {figures.speeds[dear][share]:.1f}"
        yield (
            f"| {share} | {speeds} | {services:,} | {services * low:,} to {services * high:,} | {services * memory_gb:,.0f} "
            f"| {CONNECTIONS * share} or {CONNECTIONS * share * min(NAMED, services)} | {share * per_target:,.0f}, {targets * per_target:,.0f} |"
        )
    yield ""
    yield f"- {targets:,} targets of {steps_per_s:g} steps a second, so a draft step of {1e3 / steps_per_s / figures.draft_steps:.1f} ms."
    yield (
        f"- Measured on one core: {1e3 * figures.draft_step_s:.0f} ms; a further row {figures.row_costs[0]:.0%} of that (int8), "
        f"{figures.row_costs[1]:.0%} for llama.cpp (Q4_K_M)."
    )
    yield f"- So {low} cores for each service if a step shrinks as cores are added, {high} if as on the two cores of the test machine."
    yield (
        f"- Memory of a service: {figures.weights_gb:.2f} GB of weights, {figures.process_gb:.2f} GB of a process under load, "
        f"{cache_gb:g} GB of KV cache."
    )
    yield (
        f"- Messages of a target's step: 1, an answer to {figures.answers:.0%} of them, and at most {figures.draft_steps:g} sent in "
        f"advance. One service took {figures.messages_per_s:,.0f} a second."
    )
    yield f"- Connections: {CONNECTIONS} of a target to each service that it names; one on its node, or {NAMED} of a pool."


if __name__ == "__main__":
    main()
