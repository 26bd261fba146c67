"""What reads bytes of others, one function each: whatever they are, it raises `SpecBranchError` and nothing else."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from specbranch.bench.scenario import BARE, read_scenario
from specbranch.bench.timeline import read_timeline, replay_document, time_shares
from specbranch.core.distribution import Distribution
from specbranch.engines import vocabulary as engines_vocabulary
from specbranch.engines.vocabulary import fingerprint_of, read_vocabulary, vocabulary_mismatch
from specbranch.errors import SpecBranchError
from specbranch.hrad import network
from specbranch.plugins.vllm.settings import read_settings
from specbranch.service.wire import messages
from specbranch.service.wire.payloads import unpack_probs
from specbranch.simulation.simulate import Method, simulate
from specbranch.trace import Answer, Header, Trace, read_trace, write_trace

Target = Callable[[bytes], None]

SEPARATOR = b"\n--\n"  # between two files in one input
GZIP = b"\x1f\x8b"
_PLACE = Path(tempfile.mkdtemp(prefix="specbranch-fuzz-"))
atexit.register(shutil.rmtree, _PLACE)
_SURE = Distribution((1, 2), (0.75, 0.25), 0.56)
_SHORT = Trace(Header(), (Answer((1, 2, 1, 1, 2, 1, 1, 1), (_SURE,) * 8, prompt=(2, 1)),))


def request(data: bytes) -> None:
    """A frame at the service."""
    frame = messages.encode(messages.decode_request(data))

    assert messages.encode(messages.decode_request(frame)) == frame


def reply(data: bytes) -> None:
    """A frame at the client, and the probabilities in it."""
    message = messages.decode_reply(data)
    frame = messages.encode(message)

    assert messages.encode(messages.decode_reply(frame)) == frame
    if isinstance(message, messages.DraftReply):
        for row, probs in zip(message.rows, message.probs, strict=False):
            with suppress(ValueError):  # what the client expects of them
                unpack_probs(probs, len(row or ()))


def trace(data: bytes) -> None:
    """A trace file, gzipped or not."""
    read = read_trace(_file("trace.jsonl.gz" if data.startswith(GZIP) else "trace.jsonl", data))
    again = _PLACE / "again.jsonl"
    write_trace(again, read)

    assert read_trace(again).num_tokens == read.num_tokens
    assert 0 <= read.match_share() <= 1
    assert all(len(answer.runs()) == len(answer.tokens) + 1 for answer in read.answers)


def timeline(data: bytes) -> None:
    """A timeline file, with all that `specbranch timeline` prints of it, and its replay."""
    read = read_timeline(_file("timeline.json", data)).between(0.0, math.inf)
    for lane in read.targets:
        json.dumps(time_shares(read, lane).as_json())
    json.dumps(replay_document(read, "fuzzed", str))


def hrad(data: bytes) -> None:
    """A trained predictor: card and weights."""
    card, _, weights = data.partition(SEPARATOR)
    _file(f"hrad/{network.CARD}", card)
    _file(f"hrad/{network.WEIGHTS}", weights)
    predictor = network.read_hrad(_PLACE / "hrad")
    predictor.predict(np.ones((1, predictor.d_in), np.float32))


def planner(data: bytes) -> None:
    """The settings of a target as vLLM hands them over; whatever is accepted can draft."""
    try:
        section = json.loads(data)
    except (ValueError, RecursionError):
        return  # vLLM has refused it before
    settings = read_settings(section)
    settings.client_options(8)
    simulate(_SHORT, Method(settings.planner, settings.settings), c=3)


def scenario(data: bytes) -> None:
    """The scenario of a benchmark, with all that is asked of it before a run."""
    read = read_scenario(_file("scenario.toml", data))
    json.dumps(read.as_json())
    assert read.num_trials >= 0
    read.draft_options()
    for method in read.methods:
        assert method.name == BARE or read.num_cores(method) > 0
        read.proposer_settings(method, "ipc:///nowhere")


def gguf(data: bytes) -> None:
    """The metadata of a GGUF file."""
    engines_vocabulary.read_tokens(_file("model.gguf", data))


def tokenizer(data: bytes) -> None:
    """A model's tokenizer.json and config.json."""
    first, _, second = data.partition(SEPARATOR)
    _file("model/tokenizer.json", first)
    _file("model/config.json", second)
    vocabulary = read_vocabulary(str(_PLACE / "model"))
    if vocabulary is not None:
        fingerprint_of(vocabulary)
        assert vocabulary_mismatch(vocabulary, vocabulary) is None


TARGETS: dict[str, Target] = {
    one.__name__: one for one in (request, reply, trace, timeline, hrad, planner, scenario, gguf, tokenizer)
}


def feed(target: Target, data: bytes) -> bool:
    """Whether a target accepted the bytes; an error that is not ours goes through."""
    try:
        target(data)
    except SpecBranchError:
        return False
    return True


def _file(name: str, data: bytes) -> Path:
    path = _PLACE / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
