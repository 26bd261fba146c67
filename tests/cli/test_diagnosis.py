"""Whether drafts help, and if not, why: each finding appears for the readings that it is about, and for no other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.diagnosis import KINDS, diagnose, is_fault
from specbranch.cli.readings import GateSpeeds, StatsReading, from_metrics
from specbranch.core.round import Stats
from specbranch.service.client.stats import parse_metrics_text

BUSY = StatsReading(
    at_s=0.0,
    model="target",
    stats=Stats(rounds=1000, hits=700, submitted=5000, accepted=3000),
    target_steps=1000,
    states=["on"],
)
FEW = Stats(rounds=1000, submitted=5000, accepted=1000)  # 2 tokens a verification
RARE = Stats(rounds=1000, submitted=5000, accepted=19)  # 1.019, less than the gate's margin
FASTER, SLOWER = GateSpeeds(20.0, 10.0), GateSpeeds(8.0, 10.0)
HELP, CLOSED, TOO_SHORT = "Drafts help", "Drafting is disabled at this load", "Too early to tell"
FEW_ACCEPTED, TOO_LATE = "Few draft tokens are accepted", "Drafts come too late"
UNREACHABLE, VOCABULARY = "The draft service is not reachable", "The draft model has another vocabulary"
NO_TOKENS = "No draft tokens yet"


def gated(reading: StatsReading, **speeds: GateSpeeds) -> StatsReading:
    """The reading with what a gate measured and decided, by load: r1, r2, ..."""
    by_rows = {name.removeprefix("r"): one for name, one in speeds.items()}
    return replace(reading, speeds=by_rows, gate={rows: one.ratio >= 1.02 for rows, one in by_rows.items()})


def titles(reading: StatsReading) -> list[str]:
    return [one.kind.title for one in diagnose(reading)]


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (replace(BUSY, stats=Stats(), target_steps=0), [NO_TOKENS]),
        (replace(BUSY, stats=Stats(), states=["off"]), [NO_TOKENS]),
        (replace(BUSY, stats=Stats(), states=["text"]), [NO_TOKENS]),
        (replace(BUSY, stats=Stats(), states=["text"], text_tokens=9), [TOO_SHORT]),
        (gated(replace(BUSY, stats=Stats()), r1=SLOWER), [CLOSED]),
        (gated(replace(BUSY, states=["unreachable"], stats=Stats()), r1=FASTER), [UNREACHABLE]),
        (gated(replace(BUSY, states=["unreachable", "on"]), r1=FASTER), [UNREACHABLE, HELP]),
        (replace(BUSY, states=["vocabulary"], stats=Stats()), [VOCABULARY]),
        (gated(replace(BUSY, states=["lagging"]), r1=FASTER), [TOO_LATE, HELP]),
        (gated(replace(BUSY, late_steps=21), r1=FASTER), [TOO_LATE, HELP]),
        (gated(replace(BUSY, late_steps=20), r1=FASTER), [HELP]),
        (gated(replace(BUSY, late_steps=399, target_steps=399), r1=FASTER), [HELP]),
        (gated(replace(BUSY, stats=FEW, states=["closed"]), r1=SLOWER), [FEW_ACCEPTED, CLOSED]),
        (gated(replace(BUSY, stats=FEW), r1=FASTER), [HELP]),
        (gated(replace(BUSY, stats=FEW), r1=FASTER, r2=SLOWER), [CLOSED, HELP]),
        (gated(replace(BUSY, stats=FEW, states=["closed"]), r1=GateSpeeds(1.0, 10.0)), [CLOSED]),
        (gated(replace(BUSY, stats=replace(FEW, rounds=399, submitted=1995, accepted=399)), r1=SLOWER), [CLOSED]),
        (gated(replace(BUSY, states=["closed"]), r1=SLOWER), [CLOSED]),
        (gated(BUSY, r1=FASTER), [HELP]),
        (replace(BUSY, stats=RARE), [FEW_ACCEPTED]),
        (replace(BUSY, stats=FEW), [TOO_SHORT]),
        (replace(BUSY, stats=replace(RARE, rounds=399)), [TOO_SHORT]),
        (BUSY, [TOO_SHORT]),
        (replace(BUSY, states=()), [TOO_SHORT]),  # a draft service does not see its targets' speed
    ],
)
def test_each_finding_appears_exactly_when_it_should(reading: StatsReading, expected: list[str]) -> None:
    assert titles(reading) == expected
    assert {one.kind for one in diagnose(reading)} <= set(KINDS)


def test_what_is_to_be_repaired_is_a_fault_and_a_closed_gate_is_none() -> None:
    faults = {kind.title for kind in KINDS if kind.state == "fail"}

    assert faults == {UNREACHABLE, VOCABULARY, TOO_LATE, FEW_ACCEPTED}
    assert not is_fault(diagnose(gated(BUSY, r1=FASTER, r2=SLOWER)))


def test_findings_have_figures_and_an_action_with_a_command_or_setting() -> None:
    found = [*diagnose(gated(replace(BUSY, stats=FEW, late_steps=50), r1=SLOWER)), *diagnose(gated(BUSY, r2=FASTER))]

    assert [one.detail for one in found] == [
        "50 of 1,000 steps that asked for drafts (5 %) did not get them in time.",
        "The target accepted 20 % of 5,000 draft tokens; drafts of this length help from 31 % on, by the speeds that "
        "the gate measured.",
        "The gate measured 8.0 tokens/s with drafts and 10.0 without (0.80 times) at 1 request in a step.",
        "The gate measured 20.0 tokens/s with drafts and 10.0 without (2.00 times) at 2 requests in a step.",
    ]
    assert all("`specbranch" in kind.action or "--" in kind.action for kind in KINDS)


PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
specbranch_state{engine="0",model_name="m",state="on"} 1.0
specbranch_state{engine="1",model_name="m",state="closed"} 1.0
specbranch_gate_open{engine="0",model_name="m",rows="1"} 1.0
specbranch_gate_open{engine="1",model_name="m",rows="1"} 0.0
specbranch_gate_open{engine="0",model_name="m",rows="3-4"} 1.0
specbranch_gate_tokens_per_second{engine="0",model_name="m",rows="1",way="drafts"} 12.0
specbranch_gate_tokens_per_second{engine="0",model_name="m",rows="1",way="plain"} 10.0
specbranch_gate_tokens_per_second{engine="1",model_name="m",rows="1",way="drafts"} 9.0
specbranch_gate_tokens_per_second{engine="1",model_name="m",rows="1",way="plain"} 10.0
specbranch_gate_tokens_per_second{engine="0",model_name="m",rows="3-4",way="drafts"} 30.0
specbranch_gate_tokens_per_second{engine="0",model_name="m",rows="3-4",way="plain"} 20.0
specbranch_calls_total{engine="0",model_name="m"} 900.0
specbranch_timeouts_total{engine="0",model_name="m"} 30.0
specbranch_not_waited_total{engine="0",model_name="m"} 15.0
specbranch_submitted_tokens_sum{engine="0",model_name="m"} 5200.0
specbranch_text_tokens_total{engine="0",model_name="m"} 200.0
specbranch_hits_total{engine="0",model_name="m"} 700.0
specbranch_misses_total{engine="0",model_name="m"} 300.0
specbranch_accepted_tokens_total{engine="0",model_name="m"} 3000.0
"""


def test_a_metrics_page_is_diagnosed_by_the_engine_that_gains_least() -> None:
    reading = from_metrics(parse_metrics_text(PAGE), 0.0)
    assert reading is not None

    assert (reading.late_steps, reading.text_tokens, reading.stats.submitted) == (45, 200, 5000)
    assert reading.speeds == {"1": GateSpeeds(9.0, 10.0), "3-4": GateSpeeds(30.0, 20.0)}
    assert titles(reading) == [TOO_LATE, CLOSED, HELP]


@contextlib.contextmanager
def serving(page: str) -> Iterator[str]:
    """The URL of a server with these metrics."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_doctor_says_of_a_running_server_what_top_says_and_fails_for_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.cli.readings._ANSWER_S", 20.0)
    runner = CliRunner(env={"COLUMNS": "80"})
    healthy = "".join(line for line in PAGE.splitlines(keepends=True) if "timeouts" not in line and "not_w" not in line)
    with serving(PAGE) as url:
        done, as_json = (runner.invoke(app, ["doctor", "--server", url, *more]) for more in ([], ["--json"]))
        screen = runner.invoke(app, ["top", url, "--once"])
    with serving(healthy) as url:
        assert runner.invoke(app, ["doctor", "--server", url]).exit_code == 0

    assert done.exit_code == as_json.exit_code == 1
    assert f"  FAIL  {TOO_LATE}" in done.stdout and f"  OK    {HELP}" in done.stdout
    assert screen.stdout.endswith(done.stdout)
    assert [one["title"] for one in json.loads(as_json.stdout)["findings"]] == [TOO_LATE, CLOSED, HELP]


@pytest.mark.parametrize("words", [["target", "--server", "http://h:1"], ["--server", "ipc:///d"]])
def test_doctor_refuses_a_server_with_a_target_and_an_address_that_is_no_server(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])

    assert done.exit_code == 2 and "--server" in done.stderr


def test_a_server_that_does_not_answer_is_code_one() -> None:
    done = CliRunner().invoke(app, ["doctor", "--server", "http://127.0.0.1:1", "--json"])

    assert done.exit_code == 1 and json.loads(done.stdout)["answers"] is False
