"""What each planner would do on a recorded trace, on a machine of your choice. No engine is needed.

python examples/offline.py TARGET DRAFT --record mine.jsonl   # records; so does `specbranch serve` or `plan --record`
python examples/simulate.py mine.jsonl --c 6
"""

import argparse

from specbranch import Trace, simulate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--c", type=float, default=6.0, help="time of a target step over a draft step")
    parser.add_argument("--gamma", type=int, help="the longest submission, the same for all planners; default: c")
    parser.add_argument("--row-cost", type=float, default=0.05, help="time of a further draft row over the first")
    parser.add_argument("--planners", nargs="+", default=["sps", "pearl", "specbranch", "budget"])
    args = parser.parse_args()

    trace = Trace.read(args.trace)
    print(f"{trace.num_tokens} tokens; the draft's first choice is right in {trace.match_share():.0%}")
    for planner in args.planners:
        outcome = simulate(trace, planner, c=args.c, gamma=args.gamma, row_cost=args.row_cost)
        print(f"{planner:12} {outcome.speedup:.2f}x, {outcome.stats.emitted_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main()
