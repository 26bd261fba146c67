"""`specbranch serve` as people use it: real weights, the OpenAI server and client, and things that go wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.measuring import record
from tests.models import PAIR, model_path, require_pair
from tests.root import ROOT
from tests.vllm.serving import Served, serving, started, wait_for

pytestmark = pytest.mark.timeout(1500)

DRAFT, TARGET = PAIR, f"{PAIR}-dense"
TOKENS = 32
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ANSWERED = "specbranch_answered_total"
BEGINNINGS = ("Here is a story about", "The most important fact about", "def count_words(text):  #", "A poem about")
PROMPTS = [f"{start} {subject}" for subject in ("water", "the moon", "bread", "winter") for start in BEGINNINGS]
MAX_SILENCE_S = 5.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def installed() -> None:
    require_pair("openai")


@pytest.fixture(scope="module")
def bare(installed: None) -> list[str]:
    """What bare vLLM says to each prompt, one at a time."""
    target = str(model_path(TARGET))
    command = [sys.executable, "-m", "tests.vllm.run_bare", "--target", target, "--tokens", str(TOKENS)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # two that wait for each other suffer from a busy machine
    asked = json.dumps(PROMPTS)
    done = subprocess.run(command, cwd=ROOT, env=one_thread, input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    texts: list[str] = json.loads(done.stdout.splitlines()[-1])
    return texts


@pytest.fixture(scope="module")
def served(bare: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # A draft as large as the target needs time, and with sixteen requests it is late unless it is waited for.
    ours = ["--draft", DRAFT, "--gamma", "4", "--deadline-ms", "2000", "--planner", "specbranch"]
    ours += ["--set", "wait_for_draft=true"]
    words = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    # So small a model would fill an object with line breaks for ever.
    words += ["--structured-outputs-config.disable_any_whitespace", "true"]
    words += ["--structured-outputs-config.backend", "xgrammar"]
    words += ["--additional-config", json.dumps({"specbranch": {"is_gated": False}})]
    with serving(tmp_path_factory.mktemp("serve"), TARGET, *ours, *words) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=400, max_retries=0) as client:
        yield client


def complete(client: Any, prompt: str, **more: Any) -> str:
    answer = client.completions.create(model=TARGET, prompt=prompt, max_tokens=TOKENS, temperature=0, **more)
    return str(answer.choices[0].text)


def complete_all(client: Any) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(client, prompt), PROMPTS))


def test_it_says_what_runs_where_and_when_it_is_ready(served: Served) -> None:
    said = served.out.read_text()

    assert TARGET in said and f"{DRAFT} in llamacpp on cpu" in said
    assert "specbranch wait_for_draft=True gamma=4" in said and "2000 ms" in said
    assert served.url in said
    assert "ipc://" in said
    assert "Application startup complete" not in said
    told = served.err.read_text()
    assert "Application startup complete" in told
    stages = [line for line in told.splitlines() if line.startswith(("specbranch: draft: ", "specbranch: vLLM: "))]
    assert "specbranch: vLLM: starting (imports take some seconds)" in stages  # plain lines, where there is no terminal
    assert stages[0].startswith("specbranch: draft: ") and len(set(stages)) >= 4


def test_the_engine_keeps_to_its_cores_and_the_draft_to_others(served: Served) -> None:
    """The model runs in the engine's process, not in a worker beside it."""
    cores = {pid: os.sched_getaffinity(pid) for pid in served.descendants()}
    everything = os.sched_getaffinity(0)
    if len(everything) < 2:
        pytest.skip("there is one core only")
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in cores}
    (engine,) = (pid for pid, name in names.items() if name.startswith("VLLM::Eng"))

    assert not any(name.startswith("VLLM::Wor") for name in names.values())
    assert not cores[engine] & cores[served.draft_pid()]
    frontend = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    assert cores[frontend] == everything


def test_sixteen_at_once_say_what_bare_vllm_says_one_at_a_time(served: Served, client: Any, bare: list[str]) -> None:
    before = served.metric(ACCEPTED)

    texts = complete_all(client)
    accepted = served.metric(ACCEPTED) - before
    num_equal = sum(text == other for text, other in zip(texts, bare, strict=True))
    record("server", prompts=len(PROMPTS), equal=num_equal, accepted=accepted, vllm=served.version())
    assert texts == bare
    assert accepted > 50


def test_a_request_can_ask_for_no_drafts_or_for_short_ones(served: Served, client: Any, bare: list[str]) -> None:
    submitted = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_drafts_total"
    counts = []
    for gamma in (0, 1):
        before = [served.metric(name) for name in submitted]
        text = complete(client, PROMPTS[0], extra_body={"vllm_xargs": {"specbranch_gamma": gamma}})
        counts.append([served.metric(name) - old for name, old in zip(submitted, before, strict=True)])
        assert text == bare[0]

    without, (tokens, drafts) = counts
    assert sum(without) == 0
    assert tokens == drafts > 0  # one token each
    assert served.metric("specbranch_aside_rows_total") >= TOKENS - 1


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: Any, bare: list[str]) -> None:
    stream = client.completions.create(model=TARGET, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]

    assert len(pieces) > 1
    assert "".join(pieces) == bare[0]


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: Any) -> None:
    question = {
        "model": TARGET,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**question)
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**question, stream=True)]

    assert len(pieces) > 2
    assert whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content


def test_two_answers_to_one_question(client: Any) -> None:
    ignoring = {"extra_body": {"ignore_eos": True}}
    answer = client.completions.create(
        model=TARGET, prompt=PROMPTS[0], max_tokens=16, temperature=1.0, seed=5, n=2, **ignoring
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage.completion_tokens == 32


def test_a_stop_string_ends_the_text_before_it(client: Any, bare: list[str]) -> None:
    stop = bare[0][20:24]
    answer = client.completions.create(model=TARGET, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, stop=[stop])

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == bare[0].partition(stop)[0]


def test_logprobs_are_given_for_every_token(client: Any, bare: list[str]) -> None:
    """Greedy: the token that was chosen is the likeliest one, also where it was drafted."""
    answer = client.completions.create(model=TARGET, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, logprobs=2)
    given = answer.choices[0].logprobs

    assert "".join(given.tokens) == bare[0]
    assert len(given.token_logprobs) == len(given.tokens) == TOKENS
    for token, value, top in zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True):
        assert value == max(top.values()) and token in top


def test_an_answer_by_a_json_schema_fits_it(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "animal": {"type": "string", "enum": ["cat", "dog", "fox"]},
            "legs": {"type": "integer", "enum": [2, 4]},
        },
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=TARGET,
        messages=[{"role": "user", "content": "Describe an animal as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}},
        max_tokens=60,
        temperature=0,
    )
    animal = json.loads(answer.choices[0].message.content)

    assert set(animal) == {"animal", "legs"}
    assert animal["animal"] in ("cat", "dog", "fox") and animal["legs"] in (2, 4)


def test_a_stream_that_is_closed_leaves_the_server_idle_and_well(served: Served, client: Any, bare: list[str]) -> None:
    before = served.metric("vllm:generation_tokens_total")
    stream = client.completions.create(
        model=TARGET, prompt=PROMPTS[0], max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: served.metric("vllm:num_requests_running") == 0)

    assert served.metric("vllm:generation_tokens_total") < before + 400
    assert complete(client, PROMPTS[1]) == bare[1]
    wait_for(lambda: served.metric("vllm:num_requests_running") == 0)


def test_a_killed_draft_loses_no_request_changes_no_output_and_comes_back(
    served: Served, client: Any, bare: list[str]
) -> None:
    killed = served.draft_pid()
    before = served.metric(ACCEPTED)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(complete_all, client)
        wait_for(lambda: served.metric(ACCEPTED) > before)
        os.kill(killed, signal.SIGKILL)
        was_running = served.metric("vllm:num_requests_running")
        texts = load.result(500)

    assert was_running > 0
    assert texts == bare
    wait_for(lambda: "the draft service is back" in served.out.read_text())
    assert "was ended by SIGKILL; restarting it in 1 s" in served.out.read_text()
    assert served.draft_pid() != killed
    before = served.metric(ANSWERED)

    def has_drafts_again() -> bool:
        """vLLM finds the new service within seconds, which may be one answer later; every answer is the right one."""
        assert complete(client, PROMPTS[2]) == bare[2]
        return served.metric(ANSWERED) > before

    wait_for(has_drafts_again)


def test_sigterm_stops_everything_with_code_0(served: Served) -> None:
    """The last test of this file: it ends what the others use."""
    children = served.descendants()

    assert len(children) >= 3
    assert served.stop() == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.usefixtures("installed")
def test_ctrl_c_while_vllm_loads_stops_everything_and_a_second_one_kills(tmp_path: Path) -> None:
    """vLLM is held, so that it cannot follow the first one."""
    with started(tmp_path, TARGET, "--draft", DRAFT) as served:
        wait_for(lambda: any("vllm_server" in command for command in served.descendants().values()))
        children = served.descendants()
        (vllm,) = (pid for pid, command in children.items() if "vllm_server" in command)
        os.kill(vllm, signal.SIGSTOP)
        served.process.send_signal(signal.SIGINT)
        wait_for(lambda: "Ctrl-C again to kill" in served.out.read_text())
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)

        assert served.process.wait(120) == 130
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.usefixtures("installed")
def test_if_vllm_does_not_start_the_last_line_says_why_and_the_draft_ends(tmp_path: Path) -> None:
    with started(tmp_path, TARGET, "--draft", DRAFT, "--max-model-len", "100000000") as served:
        wait_for(lambda: bool(served.descendants()))
        children = served.descendants()

        assert served.process.wait(300) == 1
        last = served.out.read_text().splitlines()[-1]
        assert "specbranch: vLLM did not start: " in last and last.endswith("; lower --max-model-len")
        assert "Traceback" in served.err.read_text()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.usefixtures("installed")
def test_a_draft_that_does_not_start_is_an_error_before_vllm_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(tmp_path, TARGET, "--draft", DRAFT, "--draft-arg", f"metrics-port={port}") as served:
            assert served.process.wait(180) == 2
            said = served.err.read_text()

    assert f"the draft service for {DRAFT} ended with code 2" in said
    assert "vLLM:" not in said


def run_in_terminal(command: list[str], environment: dict[str, str], timeout_s: float) -> list[tuple[float, str]]:
    """What a command writes to a terminal, and when; it gets a Ctrl-C as soon as it is ready."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment})
    written: list[tuple[float, str]] = []
    end_s, is_ready = time.monotonic() + timeout_s, False
    while time.monotonic() < end_s:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # it has ended
            break
        written.append((time.monotonic(), data))
        if not is_ready and "ready in" in data:
            is_ready = True
            os.kill(pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)
    return written


@pytest.mark.nightly
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", [["--enforce-eager"], []], ids=["eager", "compiled"])
def test_no_stretch_of_five_seconds_passes_without_a_sign_of_life(tmp_path: Path, words: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "specbranch", "serve", TARGET, "--draft", DRAFT, "--dtype", "float32"]
    command += ["--max-model-len", "256", "--port", port, *words]
    fresh = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    begin_s = time.monotonic()
    written = run_in_terminal(command, {"VLLM_CPU_KVCACHE_SPACE": "1", **fresh}, 1500)
    text = _ESCAPES.sub("", "".join(data for _, data in written))
    ready = next((number for number, (_, data) in enumerate(written) if "ready in" in data), len(written))
    times = [begin_s, *(at_s for at_s, _ in written[: ready + 1])]

    assert "ready in" in text, text[-4000:]
    for stage in ("draft: ", r"vLLM: starting \(", "vLLM: (setting|loading|warming|starting the)"):  # some are short
        assert re.search(stage, text)
    assert max(later - sooner for sooner, later in pairwise(times)) < MAX_SILENCE_S
