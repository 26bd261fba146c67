#!/usr/bin/env python
"""Print the tables of this study from result.json.

The heads themselves were deleted, and with them the script that made the file: both are in git at 0f4ef41.
"""

import argparse
import json
from pathlib import Path

TASKS = ("humaneval", "gsm8k", "summarization", "chat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    found = json.loads((Path(__file__).parent / "result.json").read_text())
    for one in found["replays"]:
        speeds = " | ".join(f"{one['speeds'][task]:.2f}" for task in TASKS)
        print(f"| {one['gamma']} | {one['guesses']} | {speeds} |")


if __name__ == "__main__":
    main()
