"""Replays worlds: `python -m tests.world --seed 1234`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.world.invariants import Violation
from tests.world.world import STEPS, World


def main() -> int:
    parser = argparse.ArgumentParser(description="Run simulated worlds and check what must be true of them.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="worlds, from this seed on")
    parser.add_argument("--steps", type=int, default=STEPS, help="events before faults end")
    parser.add_argument("--verbose", action="store_true", help="write down all that happens")
    args = parser.parse_args()
    num_broken = 0
    start_s = time.monotonic()
    for seed in range(args.seed, args.seed + args.count):
        world = World(seed, args.steps, say=print if args.verbose else None)
        try:
            world.run()
        except Violation as violation:
            num_broken += 1
            print(violation, flush=True)
    print(f"{args.count} worlds, {num_broken} broken, {time.monotonic() - start_s:.1f} s", file=sys.stderr)
    return int(bool(num_broken))


if __name__ == "__main__":
    sys.exit(main())
