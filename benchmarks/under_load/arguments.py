"""The arguments that the long runs have in common: prompts, and the pair of models."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser_for(text: str | None) -> argparse.ArgumentParser:
    """A parser with these arguments; `text` is what its help begins with."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the prompts")
    parser.add_argument("--target", default="smollm2-135m-dense", help="a path, or a name below $SPECBRANCH_MODELS")
    parser.add_argument("--draft", default="smollm2-short", help="the same")
    return parser
