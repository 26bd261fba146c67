"""`specbranch check`: options that are wrong or do not go together end with code 2, before any engine starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specbranch.cli import app
from specbranch.plugins.vllm import installed
from tests.exactness.toy import Toy, gullible, serving, speculative

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--planner", "none"], "nothing would be checked; choose another"),
        (["--planner", "perl"], "pearl"),
        (["--alpha", "0"], "give a number between 0 and 1"),
        (["--vllm-arg", "x"], "--vllm-arg is 'x'; give KEY=VALUE"),
        (["--report", "/no/such/place/report.md"], "there is no directory"),
        (["--target-cores", "0,999"], "this process may use"),
        (["--draft-cores", "one"], "give whole numbers"),
        (["--tensor-parallel-size", "999"], "999 workers need as many cores"),
        (["-tp=two"], "tensor_parallel_size is 'two'; give a whole number"),
        (["--plannr", "pearl"], "unknown flag --plannr: did you mean --planner?"),
        (["--quick", "word"], "unexpected word 'word'"),
        (["--additional-config.specbranch.planner", "pearl"], "sets specbranch.planner, which this command sets"),
        (["--additional-config.specbranch.pads", "on"], "did you mean 'pad'"),
    ],
)
def test_wrong_options_name_their_advice(options: list[str], advice: str) -> None:
    result = runner.invoke(app, ["check", "target", "--draft", "draft", *options])

    assert result.exit_code == 2
    assert advice in result.stderr


def test_a_draft_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    (tmp_path / "config.json").write_text("{}")
    core = str(min(os.sched_getaffinity(0)))
    result = runner.invoke(app, ["check", str(tmp_path), "--draft", "no/such/draft.gguf", "--draft-cores", core])

    assert result.exit_code == 2
    assert "--draft: there is no no/such/draft.gguf" in result.stderr


def check(endpoint: Toy, *options: str, reference: Toy | None = None) -> Result:
    with serving(endpoint) as url, serving(reference or Toy(seed=1)) as other:
        return runner.invoke(app, ["check", "--endpoint", url, "--reference", other, "--quick", *options])


def findings(result: Result) -> dict[str, str]:
    document = json.loads(result.stdout.splitlines()[-1])
    return {finding["name"]: finding["result"] for finding in document["findings"]}


def test_equal_servers_hold(tmp_path: Path) -> None:
    """Exact sampling with drafts against sampling without; the seeds are fixed."""
    report = tmp_path / "report.md"
    result = check(Toy(speculative, seed=2, accepts=4), "--json", "--report", str(report))
    document = json.loads(result.stdout)

    assert result.exit_code == 0, result.stderr
    assert document["holds"] is True
    assert set(findings(result).values()) <= {"holds", "note"}
    assert findings(result)["drafts"] == "holds"
    assert (document["alpha"], document["tie"], document["size"]["num_samples"]) == (1e-3, 0.25, 64)
    assert "all checks hold" in result.stderr and "would notice a shift of 0." in result.stderr
    assert "a correct pair fails with probability 0.001 or less" in result.stderr
    assert report.read_text().startswith(f"# {document['endpoint']['url']} against {document['reference']['url']}: all")
    assert "specbranch: sending requests to both servers: " in result.stderr  # no terminal: plain lines


@pytest.mark.parametrize(
    "wrong",
    [Toy(speculative, wrong_temperature=2.0, seed=2), Toy(gullible, seed=2)],
    ids=["another temperature", "a wrong acceptance rule"],
)
def test_another_distribution_is_found(wrong: Toy) -> None:
    result = check(wrong, "--json")

    assert result.exit_code == 1
    assert findings(result)["distribution: all together"] == "FAILED"
    assert findings(result)["greedy"] == findings(result)["greedy, 8 at once"] == "holds"


def test_another_greedy_answer_is_shown_with_its_gap() -> None:
    result = check(Toy(likes=" cloud,", seed=2), "--num-samples", "2")

    assert result.exit_code == 1
    assert "became ' cloud," in result.stdout and "gap " in result.stdout


def test_what_a_server_refuses_is_skipped() -> None:
    result = check(Toy(refuses=["response_format", "top_k"], seed=2), "--json")

    assert result.exit_code == 0, result.stderr
    assert findings(result)["distribution: JSON schema"] == findings(result)["distribution: top-k 5"] == "skipped"
    assert "all checks hold, 2 skipped" in result.stderr
    assert "HTTP 400: top_k is not supported" in result.stderr


def test_a_server_that_breaks_on_the_way_has_failed_and_the_rest_is_skipped() -> None:
    result = check(Toy(crashes_at="stop", seed=2), "--json")
    found = findings(result)

    assert result.exit_code == 1
    assert found["distribution: stop string"] == "FAILED"
    assert found["distribution: temperature 1"] == "holds"
    assert found["distribution: n = 2"] == found["distribution: top-k 5"] == "skipped"
    assert "the endpoint no longer answers" in result.stderr


@pytest.mark.parametrize(
    ("endpoint", "reference", "says"),
    [
        (Toy(seed=2), Toy(seed=1, crashes_at="stop"), "the reference no longer answers"),
        (Toy(seed=2, crashes_at="stop", code=429), Toy(seed=1), "lower --concurrency"),
    ],
    ids=["a reference that breaks", "an endpoint that has no time"],
)
def test_where_nothing_can_be_said_the_code_is_two(endpoint: Toy, reference: Toy, says: str) -> None:
    result = check(endpoint, reference=reference)

    assert result.exit_code == 2
    assert says in result.stderr


def test_drafts_of_which_none_is_accepted_check_nothing() -> None:
    result = check(Toy(seed=2, accepts=0), "--json")

    assert result.exit_code == 1
    assert [name for name, said in findings(result).items() if said == "FAILED"] == ["drafts"]
    assert "nothing was checked: 0 of" in result.stderr


def test_a_server_compared_with_itself_is_warned_of() -> None:
    with serving(Toy(seed=1)) as url:
        result = runner.invoke(app, ["check", "--endpoint", url, "--reference", f"{url}/v1", "--quick"])

    assert result.exit_code == 0
    assert "are the same server" in result.stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "name TARGET and --draft; or two servers, by --endpoint and --reference"),
        (["target"], "name TARGET and --draft; or two servers, by --endpoint and --reference"),
        (["--endpoint", "http://x"], "give both: --endpoint, the server to check, and --reference"),
        (["--reference", "http://x"], "give both: --endpoint, the server to check, and --reference"),
        (["--endpoint", "x", "--reference", "http://y"], "--endpoint is 'x'; give a URL such as"),
        (["--endpoint", "http://x", "--refrence", "http://y"], "unknown flag --refrence: did you mean --reference?"),
        (["--endpont", "http://x", "--reference", "http://y"], "unknown flag --endpont: did you mean --endpoint?"),
        (["--endpoint", "http://x", "--reference", "http://y", "word"], "word does not go with --endpoint"),
        (["--endpoint", "http://x", "--reference", "http://y", "--gamma", "3"], "--gamma does not go with --endpoint"),
        (["--endpoint", "http://x", "--reference", "http://y", "--api-key-env", "NO_SUCH"], "no such environment"),
        (["--endpoint", "http://127.0.0.1:9", "--reference", "http://127.0.0.1:9"], "cannot reach"),
        (["target", "--draft", "d", "--model", "m"], "--model belongs to --endpoint and --reference"),
        (["target", "--draft", "d", "--concurrency", "2"], "--concurrency belongs to --endpoint and --reference"),
    ],
)
def test_wrong_usage_names_the_way_out(words: list[str], advice: str) -> None:
    result = runner.invoke(app, ["check", *words])

    assert result.exit_code == 2
    assert advice in result.stderr
