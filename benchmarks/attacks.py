#!/usr/bin/env python
"""What a tenant that means harm costs another one: python benchmarks/attacks.py, in a checkout.

A draft service in a process of its own (scripted, steps of 2 ms; with --model a real one, on llama.cpp), a good client
with one sequence and about 50 steps a second, and an attacker in a third process. Every attack has a service of its
own. The good client is watched before the attack, during it, and after it: right behind it, and from 3 s on. All
traffic goes over Unix sockets; every attack ends by its count or its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import zmq

from specbranch.launch.child import Child
from specbranch.machine import provenance
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.client.transport import dealer_socket
from specbranch.service.wire.messages import (
    MAX_FRAME,
    VERSION,
    Hello,
    OpenSequences,
    Setting,
    StepRequest,
    StepRow,
    encode,
    pack_tokens,
)
from specbranch.service.wire.payloads import Digest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.service.harness import VOCAB, Walk

RESULT = Path(__file__).parent / "attacks.json"
ATTACK_S = 5.0
PAUSE_S = 0.02  # between the steps of the good client
CACHE_TOKENS = 16_384
_START_S = 60.0

Texts = Sequence[Sequence[int]]
Settings = dict[str, Setting]


class Attacker:
    """Connections to a service, and an end."""

    def __init__(self, address: str, vocab_len: int) -> None:
        self.address = address
        self.vocab_len = vocab_len
        self.end_s = time.monotonic() + ATTACK_S
        self.num_sent = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._random = random.Random(5)

    def connect(self) -> zmq.Socket[bytes]:
        dealer = dealer_socket(self._context, self.address)
        dealer.poll(500, zmq.POLLOUT)
        return dealer

    def send(self, dealer: zmq.Socket[bytes], frame: bytes) -> bool:
        """Send as soon as it is taken; what comes back is thrown away. False when the time is up."""
        while time.monotonic() < self.end_s:
            try:
                dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                dealer.poll(20, zmq.POLLOUT)
            else:
                self.num_sent += 1
                return True
            finally:
                with contextlib.suppress(zmq.Again):
                    for _ in range(64):
                        dealer.recv(zmq.NOBLOCK)
        return False

    def text(self, length: int) -> list[int]:
        chance = np.random.default_rng(self._random.getrandbits(32))
        return [int(token) for token in chance.integers(0, self.vocab_len, length)]

    def rest(self) -> None:
        """Stay connected until the end."""
        time.sleep(max(self.end_s - time.monotonic(), 0.0))

    def close(self) -> None:
        self._context.destroy(linger=0)


def opening(texts: Texts, planner: str, settings: Settings, namespace: bytes = b"attacker") -> bytes:
    return encode(OpenSequences(namespace, planner, settings, "confidence", [pack_tokens(text) for text in texts]))


def step_of(texts: Texts, token: int, wait_ms: float, namespace: bytes = b"attacker") -> bytes:
    rows = []
    for text in texts:
        before = Digest(text)
        rows.append(StepRow(before.name, [token], before.extend([token]).name, 0))
    return encode(StepRequest(1, namespace, wait_ms, rows))


def waiting(attacker: Attacker) -> None:
    """Eight clients wait a minute for 1024 rows of one text each."""
    text = attacker.text(8)
    for number in range(8):
        dealer = attacker.connect()
        namespace = b"attacker-%d" % number
        attacker.send(dealer, opening([text], "sps", {"gamma": 64}, namespace))
        attacker.send(dealer, step_of([text] * 1024, 1, 60_000, namespace))
    attacker.rest()


def gone(attacker: Attacker) -> None:
    """400 clients leave a step of 64 rows that waits, and go."""
    for _ in range(400):
        texts = [attacker.text(8) for _ in range(64)]
        dealer = attacker.connect()
        attacker.send(dealer, opening(texts, "sps", {"gamma": 64}))
        if not attacker.send(dealer, step_of(texts, 1, 60_000)):
            return
        dealer.close(linger=200)


def long_texts(length: int, num_texts: int) -> Callable[[Attacker], None]:
    def attack(attacker: Attacker) -> None:
        dealer = attacker.connect()
        frames = [opening([attacker.text(length) for _ in range(num_texts)], "pearl", {"gamma": 5}) for _ in range(8)]
        for number in range(5000):
            # Another text each time, at no cost to the attacker: another last token.
            frame = bytearray(frames[number % len(frames)])
            frame[-4:] = (number % attacker.vocab_len).to_bytes(4, "little")
            if not attacker.send(dealer, bytes(frame)):
                return

    attack.__doc__ = f"One client opens {num_texts} texts of {length} tokens at a time, without pause."
    return attack


def flood(size: int) -> Callable[[Attacker], None]:
    def attack(attacker: Attacker) -> None:
        frame = b"\xc1" * size
        for number in range(300):
            if number % 16 == 0:
                dealer = attacker.connect()
            if not attacker.send(dealer, frame):
                return
            time.sleep(0.01)

    attack.__doc__ = f"300 frames of {size >> 10} KiB of garbage, over 19 connections."
    return attack


def deep(planner: str, settings: Settings) -> Callable[[Attacker], None]:
    def attack(attacker: Attacker) -> None:
        dealer = attacker.connect()
        for _ in range(200):
            texts = [attacker.text(40) for _ in range(32)]
            if not attacker.send(dealer, opening(texts, planner, settings)):
                return
            time.sleep(0.1)

    attack.__doc__ = f"32 new texts for {planner} ten times a second, {settings}."
    return attack


def sessions(attacker: Attacker) -> None:
    """As many tiny texts as can be opened, by one client."""
    dealer = attacker.connect()
    for _ in range(100_000):
        if not attacker.send(dealer, opening([attacker.text(4)], "pearl", {"gamma": 5})):
            return


def tenants(attacker: Attacker) -> None:
    """Tiny texts in 256 namespaces, by 64 clients."""
    dealers = [attacker.connect() for _ in range(64)]
    for number in range(100_000):
        namespace = b"attacker-%d" % (number % 256)
        if not attacker.send(dealers[number % 64], opening([attacker.text(4)], "pearl", {"gamma": 5}, namespace)):
            return


def bad_settings(attacker: Attacker) -> None:
    """200 texts for a planner that is asked for with what is no number."""
    dealer = attacker.connect()
    for _ in range(200):
        attacker.send(dealer, opening([attacker.text(4)], "ssd", {"decay": float("nan")}))
        time.sleep(0.02)


def refusals(attacker: Attacker) -> None:
    """Unknown messages whose tags are 20 kB with line breaks."""
    dealer = attacker.connect()
    frame = msgspec.msgpack.encode(["\n00:00:00 ERROR forged " * 900])
    for _ in range(100_000):
        if not attacker.send(dealer, frame):
            return


def descriptors(attacker: Attacker) -> None:
    """1100 plain connections, more than the service has descriptors for, kept open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    path = attacker.address.removeprefix("ipc://")
    with contextlib.ExitStack() as held:
        for _ in range(1100):
            one = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            one.setblocking(False)
            while time.monotonic() < attacker.end_s:
                with contextlib.suppress(OSError):  # as many wait already as may, or nobody is taken now
                    one.connect(path)
                    attacker.num_sent += 1
                    break
                time.sleep(0.001)
        attacker.rest()


ATTACKS: dict[str, tuple[int, Callable[[Attacker], None]]] = {  # with the finding that each belongs to
    "descriptors": (4, descriptors),
    "waiting": (5, waiting),
    "gone": (5, gone),
    "open-250k": (5, long_texts(250_000, 1)),
    "open-32k": (5, long_texts(32_000, 1)),
    "open-16k": (5, long_texts(16_000, 1)),
    "open-8x30k": (5, long_texts(30_000, 8)),
    "flood-8M": (5, flood(8 << 20)),
    "flood-1M": (5, flood(MAX_FRAME)),
    "deep-pearl": (6, deep("pearl", {"gamma": 64})),
    "deep-ssd": (6, deep("ssd", {"gamma": 24, "num_guesses": 64})),
    "sessions": (7, sessions),
    "tenants": (7, tenants),
    "bad-settings": (7, bad_settings),
    "refusals": (9, refusals),
}
REAL = {"real-once": (6, deep("pearl", {"gamma": 4})), "real-tenants": (7, tenants)}


@dataclass
class Span:
    """What the good client saw for a while."""

    calls_s: list[float] = field(default_factory=list)
    accepted: int = 0
    timeouts: int = 0
    not_waited: int = 0
    opened: int = 0

    def summary(self) -> dict[str, Any]:
        times_ms = sorted(1000 * call_s for call_s in self.calls_s)
        return {
            "calls": len(times_ms),
            "accepted_per_call": round(self.accepted / max(len(times_ms), 1), 2),
            "median_ms": round(median(times_ms), 2),
            "p99_ms": round(times_ms[int(0.99 * len(times_ms))], 1),
            "timeouts": self.timeouts,
            "not_waited": self.not_waited,
            "opened": self.opened,
        }


class GoodClient:
    """A target that decodes one text, at its own pace."""

    def __init__(self, address: str) -> None:
        options = ClientOptions(address, "pearl", {"gamma": 4}, deadline_s=0.2)
        self.client = DraftClient(options)
        self._walk = Walk(self.client, [1, 2, 3])

    def watch(self, is_over: Callable[[], bool]) -> Span:
        """Go on until then."""
        span, counts = Span(), self.client.counts
        before = (counts.timeouts, counts.not_waited, counts.opened)
        accepted, first = self._walk.num_accepted, len(self._walk.calls_s)
        while not is_over():
            self._walk.step()
            time.sleep(PAUSE_S)
        after = (counts.timeouts, counts.not_waited, counts.opened)
        span.timeouts, span.not_waited, span.opened = (now - then for now, then in zip(after, before, strict=True))
        span.calls_s, span.accepted = self._walk.calls_s[first:], self._walk.num_accepted - accepted
        return span


class RealClient(GoodClient):
    """A target that waits for two tokens at each step of a real draft; tokens that it gets count as accepted."""

    def __init__(self, address: str) -> None:
        self.client = DraftClient(ClientOptions(address, "sps", {"gamma": 2}, deadline_s=1.0))
        self._tokens = list(range(1000, 1030))

    def watch(self, is_over: Callable[[], bool]) -> Span:
        span, num_new, counts = Span(), 1, self.client.counts
        before = (counts.timeouts, counts.not_waited, counts.opened)
        while not is_over():
            start_s = time.monotonic()
            draft = self.client.propose([SequenceUpdate(self._tokens, num_new)])[0].tokens
            span.calls_s.append(time.monotonic() - start_s)
            span.accepted += len(draft)
            self._tokens += [*draft, 1000 + len(self._tokens) % 97]
            num_new = len(draft) + 1
            time.sleep(PAUSE_S)
        after = (counts.timeouts, counts.not_waited, counts.opened)
        span.timeouts, span.not_waited, span.opened = (now - then for now, then in zip(after, before, strict=True))
        return span


def for_seconds(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s


def resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    return 0.0


@contextlib.contextmanager
def service(directory: Path, max_files: int, model: str | None) -> Iterator[tuple[Child, str, Path]]:
    """A running service, its address, and its log."""
    address, log_file = f"ipc://{directory}/draft.sock", directory / "service.log"
    if model is None:
        words = ["tests.service.scripted_service", "--cache-tokens", str(CACHE_TOKENS), "--log-level", "info"]
        words += ["--max-files", str(max_files)] if max_files else []
    else:
        words = ["specbranch", "draft", model, "--engine", "llamacpp", "--threads", "1"]
    child = Child([sys.executable, "-m", *words, "--listen", address], log_file=log_file)
    try:
        with contextlib.closing(DraftClient(ClientOptions(address))) as client:
            if child.wait_until(lambda: client.hello(0.5), _START_S) is None:
                raise SystemExit(f"the draft service {child.exit_summary}:\n{child.log_tail()}")
        yield child, address, log_file
    finally:
        child.stop(10.0)


def measure(name: str, finding: int, model: str | None, about: str) -> dict[str, Any]:
    """One attack, with all that it did to the good client and to the service."""
    with (
        tempfile.TemporaryDirectory(prefix="specbranch-") as folder,
        service(Path(folder), 1024 if name == "descriptors" else 0, model) as (child, address, log_file),
    ):
        good = RealClient(address) if model else GoodClient(address)
        with contextlib.closing(good.client):
            good.watch(for_seconds(1.0))
            before = good.watch(for_seconds(3.0))
            start_mb, peak_mb, log_len = resident_mb(child.pid), 0.0, log_file.stat().st_size
            command = [sys.executable, "-m", "benchmarks.attacks", "--attack", name, address]
            attack = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            end_s = time.monotonic() + 4 * ATTACK_S

            def is_over() -> bool:
                nonlocal peak_mb
                peak_mb = max(peak_mb, resident_mb(child.pid))
                return attack.poll() is not None or time.monotonic() > end_s

            try:
                during = good.watch(is_over)
            finally:
                attack.kill()
            num_sent = int(attack.communicate()[0] or 0)
            after = good.watch(for_seconds(3.0))
            later = good.watch(for_seconds(3.0))
            with contextlib.closing(DraftClient(ClientOptions(address))) as newcomer:
                takes_new = newcomer.hello(5.0) is not None
        spans = {"before": before, "during": during, "after": after, "from_3_s": later}
        summaries = {when: span.summary() for when, span in spans.items()}
        usual = summaries["before"]["accepted_per_call"] or 1.0
        return {
            "attack": name,
            "finding": finding,
            "about": about,
            "messages": num_sent,
            **summaries,
            "kept_during": round(summaries["during"]["accepted_per_call"] / usual, 2),
            "kept_from_3_s": round(summaries["from_3_s"]["accepted_per_call"] / usual, 2),
            "memory_mb": {
                "before": round(start_mb),
                "peak": round(peak_mb),
                "after": round(resident_mb(child.pid)),
            },
            "log_bytes": log_file.stat().st_size - log_len,
            "is_alive": child.is_running,
            "takes_new_clients": takes_new,
            "load": round(os.getloadavg()[0], 1),
        }


def run_attack(name: str, address: str) -> None:
    """The attacker's process."""
    _, act = (ATTACKS | REAL)[name]
    attacker = Attacker(address, 1000 if name in REAL else VOCAB)
    signal.alarm(int(3 * ATTACK_S))
    try:
        act(attacker)
        if attacker.num_sent and name != "descriptors":
            attacker.end_s = time.monotonic() + 1.0
            attacker.send(attacker.connect(), encode(Hello(VERSION, 1)))
    finally:
        attacker.close()
    print(attacker.num_sent)


def table(document: dict[str, Any]) -> str:
    lines = ["| attack | messages | accepted per call before, during, from 3 s | kept during | memory MB, peak | log |"]
    lines.append("|---|---|---|---|---|---|")
    for one in document["attacks"]:
        accepted = ", ".join(str(one[when]["accepted_per_call"]) for when in ("before", "during", "from_3_s"))
        memory = f"{one['memory_mb']['before']}, {one['memory_mb']['peak']}"
        lines.append(
            f"| {one['attack']} | {one['messages']} | {accepted} | {one['kept_during']} | {memory} "
            f"| {one['log_bytes'] / 1000:.0f} kB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="these attacks, by name, with commas")
    parser.add_argument("--model", help="a real draft in a GGUF file; default: only the scripted one is attacked")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of the kept result")
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)  # the attacker's process
    args = parser.parse_args()
    if args.attack:
        run_attack(*args.attack)
        return
    if not args.table:
        chosen = args.only.split(",") if args.only else [*ATTACKS, *(REAL if args.model else ())]
        document: dict[str, Any] = {
            "provenance": provenance(),
            "cache_tokens": CACHE_TOKENS,
            "attack_s": ATTACK_S,
            "attacks": [],
        }
        for name in chosen:
            finding, act = (ATTACKS | REAL)[name]
            about = (act.__doc__ or "").strip()
            document["attacks"].append(measure(name, finding, args.model if name in REAL else None, about))
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(document["attacks"][-1]), flush=True)
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
