"""Records verdicts and the draft's distributions along them as a trace, while the service runs.

A verdict is noted with what is at hand and written once its answer has gone out, so no target waits for a file. What is
written are token ids: whoever has the model's tokenizer can read the text. So a new file is its owner's alone.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from specbranch.core.distribution import Distribution
from specbranch.private_files import open_private
from specbranch.trace import NO_DISTRIBUTION, Header, Record, encode_line, top_k_of

log = logging.getLogger(__name__)

_TOP_K = 10
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Note:
    """One verdict of a session: when it came, its tokens, their distributions, and how many had been submitted.

    The first one of a session has the sequence before it as well.
    """

    session: int
    at_s: float
    prompt: list[int]
    tokens: list[int]
    distributions: list[Distribution | None]
    num_submitted: int
    is_hit: bool


class Recorder:
    """One trace file, which ends at `max_bytes`. Used by the lookup thread alone.

    An existing file, for example after a crash, is appended to. `wall_ns` and `open_file`: another clock and another
    disk, for tests.
    """

    def __init__(
        self,
        path: Path,
        draft: str,
        max_bytes: int = _MAX_BYTES,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        open_file: Callable[[Path, Literal["ab"]], BinaryIO] = open_private,
    ) -> None:
        self._path = path
        self._first = wall_ns() // 1000  # sessions of another run have other numbers
        held = _whole_len(path)
        self._file = open_file(path, "ab")
        self._file.truncate(held)
        self._left = max_bytes - held
        self._notes: list[Note] = []
        if not held:
            self._write(encode_line(Header(draft=draft)))

    def note(self, note: Note) -> None:
        """Take in a verdict."""
        if self._left > 0:
            self._notes.append(note)

    def flush(self) -> None:
        """Write what was noted; to be called when answers have gone out."""
        if not self._notes:
            return
        try:
            for note in self._notes:
                self._write(encode_line(_record(note, self._first)))
            self._file.flush()
        except OSError as error:
            log.warning("the trace %s ends here: %s", self._path, error)
            self._left = 0
        self._notes.clear()

    def close(self) -> None:
        """Write what is left; what finds no room is lost, and nothing else."""
        self.flush()
        try:
            self._file.close()
        except OSError as error:
            log.warning("the end of the trace %s is lost: %s", self._path, error)

    def _write(self, line: bytes) -> None:
        if self._left <= 0:
            return
        self._left -= len(line)
        if self._left <= 0:
            log.warning("the trace %s has reached its limit; what comes now is not recorded", self._path)
            return
        self._file.write(line)


def _record(note: Note, first: int) -> Record:
    distributions = [distribution or NO_DISTRIBUTION for distribution in note.distributions]
    return Record(
        note.tokens,
        [top_k_of(distribution, _TOP_K) for distribution in distributions],
        [round(distribution.entropy, 4) for distribution in distributions],
        note.prompt,
        session=first + note.session,
        at_s=round(note.at_s, 4),
        submitted=note.num_submitted,
        is_hit=note.is_hit,
    )


def _whole_len(path: Path) -> int:
    """How many bytes of a file are whole lines."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
