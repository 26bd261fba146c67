"""A stage that fails, hangs or comes too late costs only itself, and the report says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbranch.launch.child import Child
from tests.proof import __main__ as program
from tests.proof import report
from tests.proof.plan import BARE, EXACT, OURS, Proof
from tests.proof.stages import Outcome, Stage, carry_out, last_json, read_junit
from tests.service.harness import wait_for


def stage(code: str, most_s: float = 120.0, name: str = "one") -> Stage:
    return Stage(name, [sys.executable, "-c", code, "{out}"], last_json, most_s)


def decoded(*answers: str, accepted: int = 1, dtype: str = "float32", speed: float = 10.0) -> dict[str, Any]:
    run = {"tokens_per_s": speed, "step_ms": 9.5, "hook_ms": None, "submitted": 2, "accepted": accepted}
    return {"dtype": dtype, "runs": {"1": {**run, "answers": list(answers)}}}


def pair(bare: dict[str, Any], ours: dict[str, Any], ending: str = "") -> list[Outcome]:
    return [Outcome(name + ending, "passed", 1.0, result) for name, result in ((BARE, bare), (OURS, ours))]


def test_a_stage_gives_what_it_wrote_or_printed(tmp_path: Path) -> None:
    written = carry_out(stage("import sys; open(sys.argv[1], 'w').write('{\"a\": 1}')"), tmp_path / "1", 120)
    printed = carry_out(stage("print('some words'); print('{\"a\": 2}')"), tmp_path / "2", 120)

    assert [(one.ending, one.result) for one in (written, printed)] == [("passed", {"a": 1}), ("passed", {"a": 2})]


@pytest.mark.parametrize("code", ["raise SystemExit('the cause')", "import sys; print('the cause', file=sys.stderr)"])
def test_a_stage_without_a_result_has_failed_and_says_why(code: str, tmp_path: Path) -> None:
    outcome = carry_out(stage(code), tmp_path, 120)

    assert (outcome.ending, outcome.result) == ("failed", None)
    assert "the cause" in outcome.why


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up as soon as it has started something."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"]
    timeouts_s = []

    def wait(child: Child, timeout_s: float) -> bool:
        timeouts_s.append(timeout_s)
        wait_for(pid.exists)
        return False

    monkeypatch.setattr(Child, "wait", wait)
    outcome = carry_out(Stage("one", command, last_json, 3.0), tmp_path / "1", 120)

    assert outcome.ending == "timed out" and timeouts_s == [3.0]
    child = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_for(lambda: not _is_running(child))  # a process that was killed needs its turn to end


def test_one_that_fails_does_not_stop_the_others_and_one_report_has_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [stage("raise SystemExit(3)", name="bad"), stage("print('{}')", name="good")]
    monkeypatch.setattr(Proof, "stages", lambda self: stages)
    out = tmp_path / "proof.md"
    outcomes, equality = program.run(Proof(target="t", draft="d", num_gpus=0), out)
    document = report.read(out.read_text())

    assert [one.ending for one in outcomes] == ["failed", "passed"]
    assert not equality["holds"]
    assert [one["name"] for one in document["stages"]] == ["bad", "good"]
    assert document["provenance"]["version"] and document["summary"] in out.read_text()


def test_what_there_is_no_time_for_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proof, "stages", lambda self: [stage("print('{}')")])
    outcomes, _ = program.run(Proof(target="t", draft="d", num_gpus=0, minutes=0), tmp_path / "proof.md")

    assert [one.ending for one in outcomes] == ["skipped"]


def test_answers_are_compared_in_float32_and_only_with_drafts() -> None:
    served = pair(decoded("a", "b", dtype="auto"), decoded("a", "x", dtype="auto"))
    exact = pair(decoded("a", "b"), decoded("a", "b"), EXACT)

    assert report.judge([*served, *exact]) == {"holds": True, "answers": 2, "equal": 2, "accepted": 1}
    assert not report.judge(served)["holds"]
    assert report.judge(pair(decoded("a", "b"), decoded("a", "c")))["equal"] == 1
    assert not report.judge(pair(decoded("a"), decoded("a", accepted=0)))["holds"]
    assert not report.judge([])["holds"]


def test_the_report_compares_with_bare_vllm_of_the_same_data_type() -> None:
    outcomes = [
        *pair(decoded("a", dtype="auto"), decoded("a", dtype="auto", speed=15.0)),
        *pair(decoded("a", speed=5.0), decoded("a", speed=6.0), EXACT),
        Outcome("ngram", "failed", why="```no kernel```"),
    ]
    page = report.text({"summary": "short", "stages": [one.as_json() for one in outcomes]})

    assert f"| {OURS} | 1 | 15.0 | 1.50 | 9.50 | - | 50% | 1/1 |" in page
    assert f"| {OURS}{EXACT} | 1 | 6.0 | 1.20 |" in page
    assert "## ngram: failed" in page and "'''no kernel'''" in page
    assert [one["name"] for one in report.read(page)["stages"]] == [one.name for one in outcomes]


def test_a_gpu_gets_every_stage_and_a_draft_beside_the_target() -> None:
    one, two = (Proof(target="t", draft="d", num_gpus=num, eagle="some/EAGLE3-head") for num in (1, 2))
    names = [stage.name for stage in two.stages()]

    assert (one.draft_device, two.draft_device) == ("cuda:0", "cuda:1")
    assert {BARE, OURS, BARE + EXACT, OURS + EXACT, "engine", "profile", "draft_model", "ngram", "eagle3"} < set(names)
    assert len(names) == len(set(names))


def test_failed_tests_are_named_and_notes_of_the_suite_are_kept(tmp_path: Path) -> None:
    test = "def test_good(record_testsuite_property): record_testsuite_property('steps', 'with graphs')\n"
    (tmp_path / "test_it.py").write_text(test + "def test_bad(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "out.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = read_junit(tmp_path / "out.xml")

    assert (found["passed"], found["skipped"], found["failed"]) == (1, 0, ["test_it::test_bad"])
    assert found["noted"] == {"steps": "with graphs"}


def test_without_a_gpu_only_the_reduced_form_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "num_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gpu-proof", "target", "draft"])

    with pytest.raises(SystemExit):
        program.main()
    assert "--reduced" in capsys.readouterr().err


def _is_running(stat: Path) -> bool:
    """Whether a process still does something; one that has ended may be there until its parent asks."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
