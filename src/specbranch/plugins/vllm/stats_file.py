"""Pass the proposer's counters from vLLM's worker to the process of the metrics endpoint, through a small file.

The processes of one vLLM find the file by the name of the run, an environment variable that they inherit. Only the
owner can read the file. Each write replaces its content and checksum: a reader that finds a wrong checksum reads again.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import secrets
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from specbranch.private_files import ensure_runtime_directory, is_private, runtime_directory
from specbranch.service.client.gate import Decision, Gate
from specbranch.service.client.interface import DraftSettings, DraftSource

log = logging.getLogger(__name__)

RUN = "SPECBRANCH_RUN"
_SIZE = 16384
_HEAD = struct.Struct("<II")  # length, checksum
_TRIES = 5
_encoder = msgspec.msgpack.Encoder()


class PublishedStats(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The counters and state of one engine's proposer.

    Without an address there is no draft service, and drafts come only from n-gram lookup in the text. An empty
    namespace means that no service is asked; if there are no counts either, drafting is off.
    """

    model: str
    engine: int
    address: str | list[str]
    namespace: bytes
    keys: str | None = None
    is_lagging: bool = False
    is_closed: bool = False  # whether the gate has drafts off at the present load
    counts: dict[str, float] = {}
    lens: list[int] = []  # number of rows by draft length
    asides: dict[str, int] = {}  # rows without drafts, by cause
    vocab_mismatch: bool = False  # whether drafting is off because the vocabularies differ
    gate: list[Decision] = []  # the last decision for each load
    services: list[str] | None = None  # the addresses of the services that the client uses; None: those of `address`


_decoder = msgspec.msgpack.Decoder(PublishedStats)


class StatsFile:
    """A stats file that one engine's proposer writes."""

    def __init__(self, path: Path, model: str, engine: int) -> None:
        self.model = model
        self.engine = engine
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        try:
            os.ftruncate(file, _SIZE)
            self._memory = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)

    def publish(self, shown: PublishedStats) -> None:
        """Write these stats in place of the last ones, unless they are too long for the file."""
        body = _encoder.encode(shown)
        if len(body) <= _SIZE - _HEAD.size:
            frame = _HEAD.pack(len(body), zlib.crc32(body)) + body
            self._memory[: len(frame)] = frame


class StatsPublisher:
    """Counts the rows of one engine's proposer, and passes all its counters to the metrics endpoint."""

    def __init__(self, file: StatsFile | None, max_draft_tokens: int) -> None:
        self.file = file
        self.lens = [0] * (max_draft_tokens + 1)  # rows by the number of draft tokens
        self.skipped: Counter[str] = Counter()  # rows without drafts, by cause

    def publish(
        self, settings: DraftSettings, client: DraftSource | None, gate: Gate | None, counts: dict[str, float]
    ) -> None:
        """Write `counts`, the rows counted here, and the state of client and gate to the stats file, if any."""
        if self.file is None:
            return
        self.file.publish(
            PublishedStats(
                model=self.file.model,
                engine=self.file.engine,
                address=settings.address or [],
                keys=settings.keys,
                namespace=client.namespace if client else b"",
                services=list(client.addresses) if client else None,
                is_lagging=client.is_lagging if client else False,
                is_closed=gate is not None and not gate.was_open,
                vocab_mismatch=client.vocab_mismatch if client else False,
                counts=counts,
                lens=self.lens,
                asides=self.skipped,
                gate=list(gate.decisions.values()) if gate else [],
            )
        )


def begin_run() -> str:
    """Return the name of this vLLM run. The first process makes it and exports it as $SPECBRANCH_RUN to the others."""
    if is_first_process() or RUN not in os.environ:
        os.environ[RUN] = secrets.token_hex(8)
    return os.environ[RUN]


def is_first_process() -> bool:
    """Return whether this is the first process of a vLLM run: vLLM starts all others by `multiprocessing`."""
    return multiprocessing.parent_process() is None


def open_stats_file(names: Callable[[], tuple[str, int]]) -> StatsFile | None:
    """Open the stats file of the engine whose model name and number `names` returns.

    Return None if $SPECBRANCH_RUN is not set (`begin_run`) or, with a warning, if the file cannot be written.
    """
    run = os.environ.get(RUN)
    if run is None:
        return None
    try:
        model, engine = names()
        return StatsFile(ensure_runtime_directory() / f"{_prefix(run)}{engine}", model, engine)
    except Exception:
        log.warning(
            "no stats file can be written, so vLLM's metrics endpoint will lack the counters of specbranch",
            exc_info=True,
        )
        return None


def read_stats_files(run: str) -> Iterator[PublishedStats]:
    """Yield the published stats of all engines of a run, in the order of their files' names."""
    for path in sorted(_stats_files(run)):
        shown = _read(path)
        if shown is not None:
            yield shown


def remove_stats_files(run: str) -> None:
    """Delete all stats files of a run, also those that killed engines have left."""
    for path in _stats_files(run):
        path.unlink(missing_ok=True)


def _read(path: Path) -> PublishedStats | None:
    if path.is_symlink() or path.stat().st_uid != os.getuid() or not stat.S_ISREG(path.stat().st_mode):
        return None
    for _ in range(_TRIES):
        data = path.read_bytes()
        length, checksum = _HEAD.unpack_from(data)
        body = data[_HEAD.size : _HEAD.size + length]
        if length and zlib.crc32(body) == checksum:
            return _decoder.decode(body)
    return None


def _stats_files(run: str) -> list[Path]:
    directory = runtime_directory()
    return list(directory.glob(f"{_prefix(run)}*")) if is_private(directory) else []


def _prefix(run: str) -> str:
    return f"specbranch-metrics-{run}-"
