"""A draft service with a scripted engine, as a process: for faults and timing, where a model would only add noise.

The draft agrees with the target of `tests.service.harness` most of the time. A step takes as long as it is told.
"""

from __future__ import annotations

import argparse
import resource
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.engines.base import Row
from specbranch.logs import set_up_logs
from specbranch.service.server.prometheus import serve_metrics
from specbranch.service.server.recorder import EventSink, TraceRecorder
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.server.timeline_recorder import TimelineRecorder
from specbranch.simulation.scripted import ScriptedEngine, TextScript
from tests.service.harness import DRAFT, RECENT, VOCAB


class Brief(TextScript):
    """The draft, which looks at the last tokens only: it need not remember the others."""

    def __init__(self) -> None:
        super().__init__(VOCAB, DRAFT.distribution)

    def advance(self, state: Any, token: int) -> tuple[int, ...]:
        return (*state, token)[-RECENT:]


class SlowEngine(ScriptedEngine):
    """A scripted engine whose steps take time; like a real one it lets other threads run meanwhile.

    The step `fatal_step` ends the thread that runs it, `hung_step` never ends, and from `lost_step` on all fail.
    """

    def __init__(
        self,
        step_s: float,
        fatal_step: int | None = None,
        *,
        hung_step: int | None = None,
        hung_file: Path | None = None,
        lost_step: int | None = None,
        vocab_sample: bytes = b"",
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(Brief())
        max_tokens = max_tokens or self.info.max_tokens
        self.info = replace(self.info, vocab_fingerprint=vocab_sample, max_tokens=max_tokens)
        self._step_s = step_s
        self._fatal_step, self._hung_step, self._lost_step = fatal_step, hung_step, lost_step
        self._hung_file = hung_file
        self._num_steps = 0

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        time.sleep(self._step_s)
        self._num_steps += 1
        if self._num_steps == self._hung_step:
            if self._hung_file is not None:
                self._hung_file.touch()
            threading.Event().wait()
        if self._lost_step is not None and self._num_steps >= self._lost_step:
            raise RuntimeError("the device is lost")
        if self._num_steps == self._fatal_step:
            raise SystemExit("a fatal step")
        return super().run(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--fatal-step", type=int)
    parser.add_argument("--hung-step", type=int)
    parser.add_argument("--hung-file", type=Path, help="made when the hung step begins")
    parser.add_argument("--lost-step", type=int)
    parser.add_argument("--max-files", type=int)
    parser.add_argument("--log-level", default="error")
    parser.add_argument("--cache-tokens", type=int)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--timeline", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--max-sessions", type=int, default=256)
    parser.add_argument("--vocab-sample", type=bytes.fromhex, default=b"")
    args = parser.parse_args()
    set_up_logs("json", args.log_level)
    if args.max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.max_files, args.max_files))
    options = ServiceOptions(args.listen, max_sessions=args.max_sessions)
    timeline = TimelineRecorder() if args.timeline else None
    recorder = TraceRecorder(args.record, "scripted") if args.record else None
    engine = SlowEngine(
        args.step_ms / 1000,
        args.fatal_step,
        hung_step=args.hung_step,
        hung_file=args.hung_file,
        lost_step=args.lost_step,
        vocab_sample=args.vocab_sample,
        max_tokens=args.cache_tokens,
    )
    server = Server(engine, options, EventSink(timeline, recorder))
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    if args.metrics_port:
        serve_metrics(server.handler.metrics, "127.0.0.1", args.metrics_port)
    server.serve()
    if timeline is not None:
        timeline.write(args.timeline)


if __name__ == "__main__":
    main()
