"""`ping`, `describe` and `top`: given readings on the screen, and real services that come, work and die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from specbranch.cli import app
from specbranch.cli.commands.inspect import describe_lines
from specbranch.cli.commands.top import duration, memory, view_as_json, view_as_line, view_as_screen
from specbranch.cli.readings import GateSpeeds, Measure, StatsReading, count, from_metrics, from_overview, top_rows
from specbranch.core.round import Stats
from specbranch.plugins.vllm.metrics import Collector
from specbranch.plugins.vllm.stats_file import RUN, PublishedStats, open_stats_file
from specbranch.service.client.client import DraftClient
from specbranch.service.client.gate import Decision
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import parse_metrics_text
from specbranch.service.wire.addresses import make_keys
from specbranch.service.wire.messages import Overview
from specbranch.version import __version__
from tests.launch.test_draft_process import keys_in
from tests.root import ROOT
from tests.service.harness import PATIENCE_S, Walk, be_patient, free_port, scripted_service, tcp_service, wait_for
from tests.service.rogue import rogue

EARLIER = StatsReading(
    at_s=10.0,
    model="draft.gguf",
    stats=Stats(
        rounds=1000, hits=700, submitted=5000, accepted=3000, rejected=2000, unused=3000, rows=8000, wait_s=2.0
    ),
    target_steps=500,
    draft_steps=2000,
    draft_step_s=20.0,
    sessions=12,
    session_tokens=9120,
    targets=1,
    memory_bytes=1_230_000_000,
    uptime_s=24.0,
)
NOW = replace(
    EARLIER,
    at_s=12.0,
    stats=Stats(
        rounds=1100, hits=790, submitted=5300, accepted=3150, rejected=2150, unused=3290, rows=8600, wait_s=2.1
    ),
    target_steps=550,
    draft_steps=2200,
    draft_step_s=21.8,
    uptime_s=26.0,
)
OF_VLLM = replace(
    NOW,
    model="target",
    draft_steps=None,
    draft_step_s=None,
    targets=None,
    session_tokens=None,
    memory_bytes=None,
    uptime_s=None,
    first_row_s=0.0123,
    more_row_s=0.0011,
    states=["on"],
    gate={"1": True, "3-4": False},
    speeds={"1": GateSpeeds(4.0, 2.0), "3-4": GateSpeeds(5.0, 6.1)},
    undrafted=1,
    faults=2,
)
SCREEN = """\
specbranch: draft service at ipc:///here
draft.gguf, up 26 s
12 sessions of 1 target, 9,120 tokens, memory 1.2 GB
                              last 2.0 s       since start
verification results              50.0/s             1,100
prepared                            90 %              72 %
mean acceptance length              2.50              3.86
acceptance rate                     50 %              59 %
discarded: rejected               75.0/s             2,150
discarded: unused                145.0/s             3,290
discarded: cut                     0.0/s                 0
draft steps                      100.0/s             2,200
rows of a draft step                3.00              3.91
time of a draft step             9.00 ms           9.91 ms
busy with draft steps               90 %              84 %
wait of a target's step          2.00 ms           3.82 ms
"""
OF_SERVICE = """
Does it help?
  SKIP  Too early to tell
        A verification yields 3.86 tokens, so drafts help if it takes less than
        3.86 times as long as a step without drafts; no gate has measured that.
        Let the vLLM server decode some long answers without --no-gate, then run
        `specbranch top http://HOST:PORT` again.
"""
OF_VLLM_SCREEN = """\
specbranch: vLLM at http://here
target, drafting: on
12 sessions, 1 request not drafted for, 2 faults
a draft step of one row takes 12.3 ms, each further row 1.1 ms
tokens/s by requests in a step:
        1  4.0 with drafts, 2.0 without: drafting is on
      3-4  5.0 with drafts, 6.1 without: drafting is off
                               since start
verification results                 1,100
prepared                              72 %
mean acceptance length                3.86
acceptance rate                       59 %
discarded: rejected                  2,150
discarded: unused                    3,290
discarded: cut                           0
draft rows                           8,600
wait of a target's step            3.82 ms

Does it help?
  SKIP  Drafting is disabled at this load
        The gate measured 5.0 tokens/s with drafts and 6.1 without (0.82 times)
        at 3-4 requests in a step.
        This is expected where drafts cost more than they save; `specbranch plan
        TARGET --draft DRAFT` forecasts what would help, and --no-gate drafts
        anyway.
  OK    Drafts help
        The gate measured 4.0 tokens/s with drafts and 2.0 without (2.00 times)
        at 1 request in a step.
        Nothing to do; `specbranch plan TARGET --draft DRAFT` forecasts whether
        another draft model or planner would help more.
"""


def printed(screen: Any, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen)
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def by_name(found: Sequence[Measure]) -> dict[str, tuple[float | None, float | None]]:
    return {measure.name: (measure.last, measure.total) for measure in found}


def test_the_screen_of_a_draft_service() -> None:
    assert printed(view_as_screen("draft service at ipc:///here", NOW, EARLIER), 80) == SCREEN + OF_SERVICE


def test_the_screen_in_the_docs_is_that_of_the_command() -> None:
    page = (ROOT / "docs" / "monitor.md").read_text()
    block = page.partition("```text\n12 sessions")[2].partition("```")[0]
    quoted = f"12 sessions{block}".splitlines()

    assert len(quoted) == 11 and set(quoted) <= set(SCREEN.splitlines())


def test_the_screen_of_a_server_before_its_second_reading() -> None:
    assert printed(view_as_screen("vLLM at http://here", OF_VLLM, None), 80) == OF_VLLM_SCREEN


def test_a_wider_screen_has_the_same_words() -> None:
    screen = printed(view_as_screen("vLLM at http://here", OF_VLLM, None), 120)

    assert screen.split() == OF_VLLM_SCREEN.split()


def test_an_outage_stands_above_what_was_read_before() -> None:
    screen = printed(view_as_screen("draft service at ipc:///here", NOW, EARLIER, "nobody listens"), 80).splitlines()

    assert screen[1] == "nobody listens"
    assert screen[:1] + screen[2:] == SCREEN.splitlines()
    assert printed(view_as_screen("it", None, None, "nobody listens"), 80) == "specbranch: it\nnobody listens\n"


def test_a_reading_as_one_line() -> None:
    assert view_as_line(NOW, EARLIER) == (
        "12 sessions, verification results 50.0/s, prepared 90 %, mean acceptance length 2.50, "
        "time of a draft step 9.00 ms, wait of a target's step 2.00 ms"
    )
    assert view_as_line(OF_VLLM, None).startswith("12 sessions, on, verification results 1,100, prepared 72 %")


def test_a_time_without_verdicts_has_no_ratios() -> None:
    found = by_name(top_rows(replace(EARLIER, at_s=11.0), EARLIER))

    names = ("hit_rate", "tokens_per_round", "accepted_share", "rows_per_step", "draft_step_ms", "wait_ms")
    assert [found[name][0] for name in ("verdicts", *names)] == [0.0, *[None] * 6]
    assert all(found[name][1] for name in names)


def test_after_a_restart_the_counters_are_not_compared() -> None:
    restarted = (EARLIER, replace(NOW, target_steps=499), replace(NOW, draft_steps=1999))

    assert [later.follows(EARLIER) for later in (NOW, *restarted)] == [True, True, False, False]
    assert not EARLIER.follows(NOW)


def test_a_reading_as_json_has_sums_and_rates() -> None:
    document = json.loads(json.dumps(view_as_json(NOW, EARLIER), allow_nan=False))

    assert document["interval_s"] == 2.0
    assert document["total"]["verdicts"] == 1100 and document["last"]["verdicts"] == 50.0
    assert document["last"]["hit_rate"] == 0.9
    assert document["now"]["memory_bytes"] == 1_230_000_000
    assert view_as_json(OF_VLLM, None)["last"] is None
    assert view_as_json(OF_VLLM, None)["now"]["gate"] == {"1": True, "3-4": False}


def test_a_reading_as_json_has_the_gates_speeds_and_the_findings() -> None:
    document = json.loads(json.dumps(view_as_json(OF_VLLM, None), allow_nan=False))

    assert document["now"]["gate_tokens_per_s"]["1"] == {"drafts": 4.0, "plain": 2.0}
    assert [one["title"] for one in document["findings"]] == ["Drafting is disabled at this load", "Drafts help"]
    assert all({"title", "detail", "action"} < one.keys() for one in document["findings"])


def test_times_sizes_and_counts_are_readable() -> None:
    assert [duration(seconds) for seconds in (5.9, 65, 7384, 200_000)] == ["5 s", "1 min 5 s", "2 h 3 min", "2 d 7 h"]
    assert [memory(size) for size in (None, 67_000_000, 1_230_000_000)] == ["", "67 MB", "1.2 GB"]
    assert [count(number, "target") for number in (0, 1, 1200)] == ["0 targets", "1 target", "1,200 targets"]


def test_a_name_cannot_speak_to_the_terminal() -> None:
    reading = from_overview(Overview(1, {"model": "a\x1b[2Jb\nc [bold]"}, {}), 0.0)

    assert reading.model == "a[2Jbc [bold]"
    assert "[bold]" in printed(view_as_screen("it", reading, None), 80)


def test_a_page_is_read_by_its_samples_and_nothing_else() -> None:
    page = '# HELP a b\na_total{x="1,}",y="q\\"r"} 5\nno sample\nb 1e3 1700000000\nc{} NaN-\n\nd:e 2\n'

    assert [(one.name, one.labels, one.value) for one in parse_metrics_text(page)] == [
        ("a_total", {"x": "1,}", "y": 'q\\"r'}, 5.0),
        ("b", {}, 1000.0),
        ("d:e", {}, 2.0),
    ]
    assert from_metrics(parse_metrics_text("vllm:num_requests_running 3\nspecbranch_draft_hits_total 4\n"), 0.0) is None


def test_engines_of_a_server_are_summed_and_their_states_kept() -> None:
    page = """
specbranch_state{engine="0",model_name="m",state="on"} 1
specbranch_state{engine="0",model_name="m",state="closed"} 0
specbranch_state{engine="1",model_name="m",state="closed"} 1
specbranch_gate_open{engine="0",model_name="m",rows="1"} 1
specbranch_gate_open{engine="1",model_name="m",rows="1"} 0
specbranch_hits_total{engine="0",model_name="m"} 3
specbranch_hits_total{engine="1",model_name="m"} 4
specbranch_misses_total{engine="0",model_name="m"} 1
specbranch_rolled_back_tokens_total{engine="0",model_name="m",cause="cut"} 5
specbranch_undrafted_total{engine="0",model_name="m",reason="too_long"} 2
specbranch_submitted_tokens_sum{engine="0",model_name="m"} 20
specbranch_accepted_tokens_total{engine="0",model_name="m"} NaN
"""
    reading = from_metrics(parse_metrics_text(page), 0.0)

    assert reading is not None
    assert (reading.model, reading.states, reading.gate) == ("m", ["on", "closed"], {"1": False})
    assert reading.stats == Stats(rounds=8, hits=7, submitted=20, cut=5)
    assert reading.undrafted == 2 and reading.draft_steps is None


def test_a_description_has_what_the_service_tells() -> None:
    settings: dict[str, str | int] = {
        "version": "1.2",
        "wire": 8,
        "model": "draft",
        "engine": "torch",
        "device": "cpu",
        "dtype": "int8",
        "weight_bytes": 500_000_000,
        "vocab_len": 151_936,
        "cache_tokens": 65_536,
        "max_handles": 256,
        "max_sessions": 64,
        "row_limit": 32,
    }
    figures = {"targets": 1.0, "sessions": 3.0, "session_tokens": 1500.0, "memory_bytes": 2e9, "uptime_seconds": 61.0}

    assert describe_lines(Overview(1, settings, figures)) == {
        "model": "draft",
        "engine": "torch, device cpu, int8, 500 MB of weights",
        "vocabulary": "151,936 tokens",
        "cache": "65,536 tokens, 256 branches",
        "limits": "64 sessions, 32 rows a step",
        "version": "1.2, protocol 8",
        "targets": "1 now, with 3 sessions of 1,500 tokens",
        "memory": "2.0 GB",
        "uptime": "1 min 1 s",
    }
    assert "model" not in describe_lines(Overview(1, {}, {}))


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))


def document(done: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def decode(address: str, steps: int = 20, namespace: bytes | None = None) -> None:
    """Let a target take this many steps."""
    options = ClientOptions(address, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S, namespace=namespace)
    with contextlib.closing(DraftClient(options)) as client:
        client.hello(PATIENCE_S)
        walk = Walk(client, [1, 2, 3])
        for _ in range(steps):
            walk.step()
        client.hello(PATIENCE_S)  # answered in order, so the last step has come


def test_a_service_that_runs_is_reached_described_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    with scripted_service(tmp_path) as service:
        decode(service.address)
        pinged, as_words = run("ping", service.address, "--json"), run("ping", service.address)
        described, as_screen = run("describe", service.address, "--json"), run("describe", service.address)
        read, shown = run("top", service.address, "--once", "--json"), run("top", service.address, "--once")

    assert [done.exit_code for done in (pinged, as_words, described, as_screen, read, shown)] == [0] * 6
    assert document(pinged).pop("round_trip_ms") > 0
    assert {**document(pinged), "round_trip_ms": 0} == {
        "address": service.address,
        "answers": True,
        "model": "scripted",
        "version": __version__,
        "wire": document(described)["settings"]["wire"],
        "round_trip_ms": 0,
    }
    assert f"scripted, version {__version__}" in as_words.stdout
    assert document(described)["figures"]["target_steps"] == 20
    assert "1 now, with 1 session of" in as_screen.stdout
    assert document(read)["total"]["verdicts"] == 19
    assert document(read)["now"]["sessions"] == document(read)["now"]["targets"] == 1
    assert document(read)["last"] is None
    assert "verification results" in shown.stdout and "since start" in shown.stdout


@pytest.mark.parametrize("words", [["ping"], ["describe"], ["top", "--once"]], ids=lambda words: words[0])
def test_a_service_that_is_not_there_is_code_one_and_says_what_to_do(tmp_path: Path, words: list[str]) -> None:
    address = f"ipc://{tmp_path}/nobody.sock"
    done, as_json = run(*words, address), run(*words, address, "--json")

    assert done.exit_code == as_json.exit_code == 1
    assert f"nobody listens at {address}; start one by `specbranch draft MODEL`" in done.stderr
    assert not done.stdout
    assert document(as_json) == {"address": address, "answers": False, "cause": f"nobody listens at {address}"}


def test_without_an_address_the_users_own_socket_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert str(tmp_path) in document(run("ping", "--json"))["address"]


def test_addresses_and_keys_that_cannot_be_right_are_code_two(tmp_path: Path) -> None:
    for words in (["ping", "somewhere"], ["describe", "tcp://127.0.0.1:1"], ["top", "somewhere"]):
        assert run(*words).exit_code == 2
    done = run("top", "http://127.0.0.1:1", "--keys", str(tmp_path))
    assert done.exit_code == 2 and "--keys belongs to a draft service" in done.stderr


def test_over_tcp_the_right_keys_are_let_in_and_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path / "theirs")
    with tcp_service(keys_in(tmp_path / "ours")) as address:
        for command in (["ping"], ["describe"], ["top", "--once"]):
            with monkeypatch.context() as patch:
                be_patient(patch)
                assert run(*command, address, "--keys", str(tmp_path / "ours")).exit_code == 0
            monkeypatch.setattr("specbranch.launch.draft_process._CONNECT_S", PATIENCE_S)  # it greets everybody
            done = run(*command, address, "--keys", str(tmp_path / "theirs"))
            assert done.exit_code == 1 and "or it does not know these keys" in done.stderr


def test_a_service_of_an_older_release_answers_a_ping_and_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    with rogue(tmp_path, "old") as service:
        assert document(run("ping", service.address, "--json"))["version"] is None
        assert "version unknown" in run("ping", service.address).stdout
        done = run("top", service.address)

    assert done.exit_code == 2 and "has an older version" in done.stderr


@contextlib.contextmanager
def vllms_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> Iterator[str]:
    """The URL of a page with our real metrics, as they are on vLLM's endpoint; without vLLM's own."""
    from prometheus_client import CollectorRegistry, start_http_server

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(RUN, "r1")
    written = open_stats_file(lambda: ("target", 0))
    assert written is not None
    counts = {"calls": 20.0, "wait_s": 0.5}
    written.publish(
        PublishedStats(
            model="target",
            engine=0,
            address=address,
            namespace=b"ours",
            counts=counts,
            lens=[2, 4, 14],
            gate=[Decision(1, True, 4.0, 2.0, 512)],
        )
    )
    registry = CollectorRegistry()
    collector = Collector("r1", timeout_s=PATIENCE_S)
    registry.register(collector)
    port = free_port()
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)
        collector.close()


def test_a_server_is_read_by_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    with scripted_service(tmp_path) as service:
        decode(service.address, namespace=b"ours")
        with vllms_page(tmp_path, monkeypatch, service.address) as url:
            # A step that reads tells nothing of the time of a row; one that does not is taken sooner or later.
            wait_for(lambda: document(run("top", url, "--once", "--json"))["now"]["first_row_ms"] > 0)
            read, shown = document(run("top", url, "--once", "--json")), run("top", f"{url}/metrics", "--once")
    after = run("top", url, "--once")

    assert (read["model"], read["now"]["states"], read["now"]["gate"]) == ("target", ["on"], {"1": True})
    assert read["total"]["verdicts"] == 19
    assert read["total"]["wait_ms"] == 25.0
    assert read["now"]["gate_tokens_per_s"] == {"1": {"drafts": 4.0, "plain": 2.0}}
    assert [one["title"] for one in read["findings"]] == ["Drafts help"]
    assert read["now"]["first_row_ms"] > 2
    assert f"vLLM at {url}" in shown.stdout and "1  4.0 with drafts, 2.0 without: drafting is on" in shown.stdout
    assert after.exit_code == 1 and "Connection refused" in after.stderr


def test_a_services_own_endpoint_is_read_too_and_another_servers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    from prometheus_client import CollectorRegistry, start_http_server

    port, other = free_port(), free_port()
    with scripted_service(tmp_path, "--metrics-port", str(port)) as service:
        decode(service.address)
        shown = run("top", f"http://127.0.0.1:{port}", "--once")
    server, thread = start_http_server(other, addr="127.0.0.1", registry=CollectorRegistry())
    try:
        strange = run("top", f"http://127.0.0.1:{other}", "--once")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)

    assert f"draft service at http://127.0.0.1:{port}" in shown.stdout and "time of a draft step" in shown.stdout
    assert strange.exit_code == 1 and "has no metrics of specbranch" in strange.stderr


class Broken(BaseHTTPRequestHandler):
    """A server whose page cannot be made, and that would like to clear the screen."""

    def do_GET(self) -> None:
        self.send_response(503, "bad\x1b[2Jnews")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_that_cannot_show_its_metrics_is_quoted_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = run("top", f"http://127.0.0.1:{server.server_port}", "--once")
        server.shutdown()
        thread.join(PATIENCE_S)

    assert done.exit_code == 1 and "answers with 503 bad[2Jnews" in done.stderr


class Watcher:
    """A running `specbranch top`; its output is read as it comes."""

    def __init__(self, *words: str, stdout: int = subprocess.PIPE, term: str = "xterm") -> None:
        command = [sys.executable, "-m", "specbranch", "top", "--interval", "0.2", *words]
        environment = {**os.environ, "TERM": term, "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        )

    def wait_for(self, words: str) -> str:
        """The next line that has these words."""
        assert self.process.stdout is not None
        guard = threading.Timer(PATIENCE_S, self.process.kill)
        guard.start()
        try:
            for line in self.process.stdout:
                if words in line:
                    return line
        finally:
            guard.cancel()
        raise AssertionError(f"it ended, and never said {words!r}")

    def interrupt(self) -> tuple[int, str]:
        """The exit code after Ctrl-C, and what was on standard error."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


def test_a_service_that_dies_is_reported_and_found_again(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service:
        watcher = Watcher(service.address)
        watcher.wait_for("0 sessions, verification results 0.0/s")
        decode(service.address)
        watcher.wait_for("1 session, ")
        service.kill()
        watcher.wait_for(f"nobody listens at {service.address}; trying again")
        service.start()
        watcher.wait_for("0 sessions, verification results 0,")  # the new one counts from the beginning
        service.signal(signal.SIGSTOP)
        watcher.wait_for("does not answer; trying again")
        service.signal(signal.SIGCONT)
        watcher.wait_for("verification results 0.0/s")

        assert watcher.interrupt() == (0, "")


def test_readings_for_machines_go_on_until_ctrl_c(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service:
        watcher = Watcher(service.address, "--json")
        first, second = (json.loads(watcher.wait_for('"answers": true')) for _ in range(2))
        service.kill()
        lost = json.loads(watcher.wait_for('"answers": false'))

        assert watcher.interrupt() == (0, "")
    assert first["last"] is None
    assert second["last"]["verdicts"] == 0.0 and second["interval_s"] > 0
    assert lost["cause"].startswith("nobody listens")


def test_on_a_terminal_one_screen_is_drawn_again_and_again(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with scripted_service(tmp_path) as service:
        watcher = Watcher(service.address, stdout=theirs)
        os.close(theirs)
        drawn = read_until(ours, b"last ")
        drawn += read_until(ours, b"last ")
        service.kill()
        drawn += read_until(ours, b"nobody listens")
        code, errors = watcher.interrupt()
        drawn += read_rest(ours)

    assert (code, errors) == (0, "")
    assert drawn.count(b"acceptance rate") >= 3
    assert b"\x1b[1A" in drawn  # over the last one
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")  # the cursor is back


def test_on_a_terminal_that_cannot_draw_there_are_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with scripted_service(tmp_path) as service:
        watcher = Watcher(service.address, stdout=theirs, term="dumb")
        os.close(theirs)
        read_until(ours, b"0 sessions, verification results 0.0/s")
        assert watcher.interrupt() == (0, "")
        assert b"\x1b" not in read_rest(ours)


def read_until(terminal: int, words: bytes) -> bytes:
    found, end_s = b"", time.monotonic() + PATIENCE_S
    while words not in found:
        assert time.monotonic() < end_s, found
        found += os.read(terminal, 4096)
    return found


def read_rest(terminal: int) -> bytes:
    """What is left, after the other side has ended."""
    found = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            found += part
    os.close(terminal)
    return found
