"""Files of what users wrote: a new one can be read by its owner only, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal


def open_private(path: Path, mode: Literal["ab", "xb"]) -> BinaryIO:
    """Open a file to write to; one that is there already keeps its rights."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
