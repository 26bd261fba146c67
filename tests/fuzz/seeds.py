"""Write the whole files of the corpus anew, as this version writes and reads them: `python -m tests.fuzz.seeds`."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from specbranch.core.distribution import Distribution
from specbranch.core.planners import PLANNERS, draft_length_limit
from specbranch.hrad.network import write_hrad
from specbranch.service.server.timeline_recorder import RowVerdict, TimelineRecorder, TreeSnapshot, VerdictTree
from specbranch.service.wire import messages
from specbranch.service.wire.payloads import DIGEST_LEN, pack_probs
from specbranch.trace import Header, Record, encode_line
from tests.engines.test_vocabulary import BEFORE, gguf_file, token_pair
from tests.fuzz.corpus import read_cases, write_cases
from tests.fuzz.targets import SEPARATOR, TARGETS
from tests.hrad.test_network import CARD, small_tensors
from tests.root import ROOT

_NAME = bytes(range(DIGEST_LEN))
_SURE = Distribution((7, 8), (0.75, 0.25), 0.56)


def _request() -> Iterator[bytes]:
    sampling = messages.WireSampling(0.8, 0.95, 40, 12345)
    row = messages.StepRow(_NAME, [1, 2, 3], _NAME, 2, messages.WireHint(1), [4, 5], sampling, 3, True)
    yield messages.encode(messages.Hello(messages.VERSION, 1, messages.OLDEST_VERSION))
    yield messages.encode(messages.Hello(messages.OLDEST_VERSION, 1), messages.OLDEST_VERSION)
    yield messages.encode(
        messages.StepRequest(
            2, b"me", 20.0, [row, messages.StepRow(_NAME, [9], _NAME, 0)], 5000, messages.OtherRows(2, 5, 3)
        )
    )
    yield messages.encode(
        messages.OpenSequences(
            b"me", "budget", {"gamma": 8, "cost_aware": True}, "confidence", [messages.pack_tokens([1, 2, 3])]
        )
    )
    yield messages.encode(messages.StatsRequest(3, b"me"))
    yield messages.encode(messages.OverviewRequest(4))
    yield messages.encode(messages.Drain(5))
    yield messages.encode(messages.Rest(b"me"))


def _reply() -> Iterator[bytes]:
    probs = pack_probs([_SURE, None])
    ahead = messages.PrefetchRow(_NAME, [messages.VerdictDraft([1, 2], [7, 8], probs)])
    counts = dict.fromkeys(messages.StatsReply.__struct_fields__, 5)
    for version in (messages.VERSION, messages.OLDEST_VERSION):
        yield messages.encode(messages.Welcome(version, 1, "small", 1000, bytes(range(8))), version)
    yield messages.encode(messages.DraftReply(2, [[7, 8], None], [probs, b""]))
    yield messages.encode(messages.PrefetchPush([ahead]))
    yield messages.encode(messages.ErrorReply("no planner is called x"))
    yield messages.encode(messages.StatsReply(**counts))
    yield messages.encode(messages.Draining(5, True, 3))
    yield messages.encode(messages.Overview(4, {"draft": "small", "row_limit": 64}, {"steps": 7.0}))


def _trace() -> Iterator[bytes]:
    header = encode_line(Header(target="large", draft="small", task="chat"))
    whole = Record([7, 8], [([7, 8], [0.75, 0.25]), None], [0.56, 0.0], prompt=[1, 2], foreseen=[0, 2])
    parts = [
        Record([7], [([7], [1.0])], [0.0], session=1, at_s=float(time), submitted=2, is_hit=True) for time in range(2)
    ]
    yield header + encode_line(whole)
    yield header + b"".join(map(encode_line, parts))
    yield gzip.compress(header + encode_line(whole), mtime=0)


def _timeline() -> Iterator[bytes]:
    recorder, lane = TimelineRecorder(), (b"me", b"ours")
    recorder.open(lane, 10.0, "budget", 1, 5)
    recorder.answer(lane, 10.0, 10.0, num_held=0)
    for start_s in (10.0, 11.0, 12.0):
        recorder.draft(start_s, start_s + 0.4, rows=2, tokens=2, is_prefill=start_s == 10.0, sessions={1})
        tree = VerdictTree(1, (7, 8, 9), _tree())
        recorder.arrive(lane, start_s + 0.5, [RowVerdict(4, 3, True, is_hit=start_s != 11.0, tree=tree)])
        recorder.answer(lane, start_s + 0.5, start_s + 0.7, num_held=1)
    with tempfile.TemporaryDirectory() as place:
        recorder.write(Path(place) / "timeline.json")
        yield (Path(place) / "timeline.json").read_bytes()


def _tree() -> TreeSnapshot:
    return TreeSnapshot(array("H", [0, 1, 0]), array("i", [7, 8, 5]), array("B", [75, 56, 25]), array("B", [3, 3, 0]))


def _hrad() -> Iterator[bytes]:
    yield _two_files(lambda place: write_hrad(place, small_tensors(), CARD), "card.json", "hrad.safetensors")


def _two_files(write: Callable[[Path], None], first: str, second: str) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        return (Path(place) / first).read_bytes() + SEPARATOR + (Path(place) / second).read_bytes()


def _planner() -> Iterator[bytes]:
    for name in PLANNERS:
        settings = {} if name == "none" else {"gamma": min(4, draft_length_limit(name))}
        yield json.dumps({"planner": name, "settings": settings, "deadline_ms": 20.5, "namespace": "mine"}).encode()
    more = {"gamma": 3, "num_guesses": 6, "acceptance": 0.7, "decay": 1.2, "fallback": "fast"}
    yield json.dumps({"planner": "ssd", "settings": more, "rule": "match", "pad": "on"}).encode()
    more = {"gamma": 5, "max_rows": 4, "cost_aware": False, "min_accept_prob": 0.1}
    yield json.dumps({"planner": "budget", "settings": more, "is_gated": False, "runner": "v2"}).encode()


def _scenario() -> Iterator[bytes]:
    for name in ("served-small", "served-flagship"):
        yield (ROOT / "benchmarks" / f"{name}.toml").read_bytes()


def _gguf() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as place:
        yield gguf_file(Path(place) / "x.gguf", *BEFORE, token_pair(["<s>", "the", "ü"])).read_bytes()


def _tokenizer() -> Iterator[bytes]:
    config = b'{"vocab_size": 300}'
    added = [{"id": 2, "content": "<s>"}]
    yield json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}).encode() + SEPARATOR + config
    yield json.dumps({"model": {"vocab": [["a", -0.5], ["[PAD1]", 0]]}}).encode() + SEPARATOR + config
    yield b"{}" + SEPARATOR + b'{"text_config": {"vocab_size": 64}, "scale": Infinity}'


SEEDS = {name: globals()[f"_{name}"] for name in TARGETS}


def main() -> None:
    for name, seeds in SEEDS.items():
        kept = {case: data for case, data in read_cases(name).items() if not re.fullmatch(r"whole-\d+", case)}
        write_cases(name, kept | {f"whole-{number}": data for number, data in enumerate(seeds())})


if __name__ == "__main__":
    main()
