"""A target's process seen from outside, with a worker that needs no vLLM: runs go in, news and failures come out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbranch.launch import vllm_worker
from specbranch.launch.vllm_engine import Engine, LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, PromptRequest, TargetFailure, TargetProcess
from specbranch.plugins.vllm.settings import ProposerSettings

WORKER = """
import os, sys
import msgspec
from specbranch.launch.vllm_worker import DecodedOutput, DecodeJob, DecodeResult, WorkerEvent
from specbranch.launch.vllm_engine import Engine, LocalEngineOptions

def say(news):
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\\n")
    sys.stdout.buffer.flush()

options = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalEngineOptions)
say(WorkerEvent(engine=Engine({"vllm": options.model}, options.settings.planner, os.environ["OMP_NUM_THREADS"])))
for line in sys.stdin.buffer:
    run = msgspec.json.decode(line, type=DecodeJob)
    if run.batch:
        sys.exit("out of memory")
    for _ in run.asks:
        say(WorkerEvent(num_finished=1))
    answers = [DecodedOutput(text=ask.prompt, logprobs=[{3: -0.5}]) for ask in run.asks]
    say(WorkerEvent(done=DecodeResult(answers=answers, counts={"wait_s": run.settings.deadline_ms})))
"""
CORES = [min(os.sched_getaffinity(0))]
OPTIONS = LocalEngineOptions("large", ProposerSettings(planner="pearl"))


@pytest.fixture(autouse=True)
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(vllm_worker, "_WORKER", "fake_worker")


def test_options_and_runs_arrive_whole_and_their_outputs_come_back(tmp_path: Path) -> None:
    finished: list[int] = []
    with TargetProcess(OPTIONS, tmp_path / "log", cores=CORES) as target:
        done = target.run(
            DecodeJob([PromptRequest("a", {}), PromptRequest("b", {})], settings=ProposerSettings(deadline_ms=7)),
            finished.append,
        )

    assert target.engine == Engine({"vllm": "large"}, "pearl", "1")
    assert [answer.text for answer in done.answers] == ["a", "b"]
    assert done.answers[0].logprobs == [{3: -0.5}]
    assert done.counts == {"wait_s": 7.0}
    assert finished == [1, 1]


def test_a_target_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(TargetFailure, match=r"vLLM with large ended with code 1 .*\nout of memory"),
        TargetProcess(OPTIONS, tmp_path / "log", cores=CORES) as target,
    ):
        target.run(DecodeJob([], batch=1))


def test_a_target_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    bare = LocalEngineOptions("large")  # the fake one needs settings
    with (
        pytest.raises(TargetFailure, match="'NoneType' object has no attribute 'planner'"),
        TargetProcess(bare, tmp_path / "log"),
    ):
        pass
