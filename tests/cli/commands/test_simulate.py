"""`specbranch simulate` as a person and as a machine would call it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch import __version__
from specbranch.cli import app
from specbranch.core.planners import PLANNERS
from specbranch.simulation.presets import PAIRS, make_trace
from specbranch.trace import write_trace
from tests.cli.test_help import help_of, plain

runner = CliRunner()


def test_the_version_is_printed() -> None:
    assert runner.invoke(app, ["--version"]).stdout.strip() == f"specbranch {__version__}"


def test_json_is_one_document_on_the_last_line() -> None:
    result = runner.invoke(app, ["simulate", "--preset", "llama-68m-7b", "--tokens", "300", "--json"])

    assert result.exit_code == 0
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["preset"] == "llama-68m-7b"
    assert set(document["planners"]) == set(PLANNERS)
    assert set(document["planners"]["specbranch"]) >= {
        "speedup", "emitted_per_round", "hit_rate", "rolled_back", "wait_share", "rows_per_round",
    }  # fmt: skip
    assert document["planners"]["none"]["speedup"] == pytest.approx(1.0)


def test_a_recorded_trace_keeps_its_own_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_trace(path, make_trace(PAIRS["llama3-8b-70b"], 1, 20, random.Random(0)))
    result = runner.invoke(app, ["simulate", "--trace", str(path), "--c", "5", "--sweep", "acceptance=0.5,0.6"])

    assert result.exit_code == 2
    assert "a recorded trace has its own acceptance" in " ".join(result.stderr.split())


def test_the_table_names_every_planner() -> None:
    result = runner.invoke(app, ["simulate", "--tokens", "200"])

    assert result.exit_code == 0
    assert all(name in result.stdout for name in PLANNERS)
    assert "…" not in result.stdout


def test_the_same_seed_gives_the_same_figures() -> None:
    call = ["simulate", "--tokens", "300", "--planners", "specbranch", "--predictor", "random", "--json", "--seed", "7"]

    assert runner.invoke(app, call).stdout == runner.invoke(app, call).stdout


def test_a_pair_of_ones_own_is_simulated() -> None:
    call = ["simulate", "--acceptance", "0.8", "--c", "6", "--tokens", "300", "--planners", "pearl", "--json"]
    document = json.loads(runner.invoke(app, [*call, "--row-cost", "0.2", "--gamma", "4", "--batch", "2"]).stdout)

    assert (document["preset"], document["c"], document["row_cost"], document["batch"]) == ("custom", 6.0, 0.2, 2)
    assert document["planners"]["pearl"]["settings"] == {"gamma": 4}


def test_a_draft_that_is_very_fast_gets_the_longest_window_there_is() -> None:
    call = ["simulate", "--acceptance", "0.5", "--c", "100", "--tokens", "50", "--planners", "pearl", "--json"]

    assert runner.invoke(app, call).exit_code == 0


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    write_trace(path, make_trace(PAIRS["llama3-8b-70b"], 2, 80, random.Random(0)))
    call = ["simulate", "--trace", str(path), "--c", "5", "--planners", "none,pearl", "--best-gamma", "--json"]
    document = json.loads(runner.invoke(app, call).stdout.splitlines()[-1])

    assert document["preset"] == "mine.jsonl.gz"
    assert document["num_tokens"] == 160
    assert document["planners"]["pearl"]["speedup"] > 1.5


@pytest.mark.parametrize("c", ["0.01", "1000"])
@pytest.mark.parametrize("row_cost", ["0", "100"])
def test_every_planner_comes_to_an_end_at_the_bounds_of_what_it_may_cost(c: str, row_cost: str) -> None:
    call = ["simulate", "--c", c, "--row-cost", row_cost, "--tokens", "100", "--json"]
    document = json.loads(runner.invoke(app, call).stdout.splitlines()[-1])

    assert all(0 < figures["speedup"] < 1000 for figures in document["planners"].values())


def test_the_help_says_within_which_bounds_costs_may_be() -> None:
    text = plain(help_of("simulate"))

    assert "from 0.01 to 1000" in text
    assert "from 0 to 100" in text


def test_presets_are_listed_with_their_sources() -> None:
    result = runner.invoke(app, ["simulate", "--list"], terminal_width=200)

    assert result.exit_code == 0
    assert all(name in result.stdout for name in PAIRS)
    assert "chain" in result.stdout


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    call = ["simulate", "--tokens", "250", "--planners", "none,sps,specbranch", "--plot", str(path)]

    assert runner.invoke(app, call).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_settings_are_given_to_all_planners_that_have_them_or_to_one() -> None:
    call = ["simulate", "--tokens", "300", "--planners", "pearl,specbranch,none", "--json", "--set", "gamma=3"]
    result = runner.invoke(app, [*call, "--set", "specbranch.confidence=0.7", "--set", "specbranch.gamma=5"])
    planners = json.loads(result.stdout.splitlines()[-1])["planners"]

    assert planners["pearl"]["settings"] == {"gamma": 3}
    assert planners["specbranch"]["settings"]["gamma"] == 5
    assert planners["specbranch"]["settings"]["confidence"] == 0.7
    assert planners["none"]["settings"] == {}


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("c=2,8", [2, 8]),
        ("specbranch.confidence=0.1:0.5:0.2", [0.1, 0.3, 0.5]),
        ("gamma=2:6:2", [2, 4, 6]),
        ("row-cost=0,0.5", [0, 0.5]),
        ("correlation=0,0.5", [0, 0.5]),
        ("wait_for_draft=true,false", [True, False]),
    ],
)
def test_a_sweep_simulates_each_value_and_draws_the_speeds(sweep: str, values: list[object], tmp_path: Path) -> None:
    plot = tmp_path / "sweep.png"
    call = ["simulate", "--tokens", "300", "--planners", "pearl,specbranch", "--json", "--plot", str(plot)]
    result = runner.invoke(app, [*call, "--sweep", sweep])
    document = json.loads(result.stdout.splitlines()[-1])

    assert document["values"] == values
    assert len({point["speedup"] for point in document["planners"]["specbranch"]}) == len(values)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_in_a_sweep_over_c_gamma_is_c() -> None:
    call = ["simulate", "--tokens", "300", "--planners", "pearl", "--json"]
    swept = json.loads(runner.invoke(app, [*call, "--sweep", "c=4"]).stdout.splitlines()[-1])
    once = json.loads(runner.invoke(app, [*call, "--c", "4", "--gamma", "4"]).stdout.splitlines()[-1])

    assert swept["planners"]["pearl"][0]["speedup"] == once["planners"]["pearl"]["speedup"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "gama=3"], "did you mean 'gamma'"),
        (["--set", "sps.confidence=3"], "none of the planners"),
        (["--set", "gamma"], "give KEY=VALUE"),
        (["--set", "gamma=99"], "give a whole number from 1 to 64"),
        (["--sweep", "c"], "give KEY=VALUES"),
        (["--sweep", "c=1:2"], "give KEY=VALUES"),
        (["--sweep", "c=1:2:0"], "give KEY=VALUES"),
        (["--sweep", "c=1:1000:1"], "give 1 to 100"),
        (["--sweep", "c=0"], "c is 0; give a number from 0.01 to 1000"),
        (["--sweep", "batch=1.5"], "give a whole number"),
        (["--sweep", "acceptance=1"], "between 0 and 1"),
        (["--sweep", "colour=1,2"], "none of the planners"),
        (["--plot", "absent/plot.png"], "create it first"),
        (["--correlation", "1"], "from 0 to 0.95"),
        (["--preset", "gpt"], "choose from llama-68m-7b"),
        (["--trace", "absent.jsonl", "--c", "3"], "cannot be read"),
        (["--trace", "absent.jsonl"], "need --c"),
        (["--acceptance", "0.5"], "need --c"),
        (["--acceptance", "1.5", "--c", "3"], "between 0 and 1"),
        (["--acceptance", "0.5", "--c", "3", "--preset", "llama-68m-7b"], "exclude each other"),
        (["--c", "0"], "--c is 0.0; give a number from 0.01 to 1000"),
        (["--c", "inf"], "--c is inf; give a number from 0.01 to 1000"),
        (["--c", "nan", "--acceptance", "0.5"], "--c is nan; give a number"),
        (["--c", "1e300"], "give a number from 0.01 to 1000"),
        (["--row-cost", "-1"], "--row-cost is -1.0; give a number from 0 to 100"),
        (["--row-cost", "inf"], "--row-cost is inf; give a number from 0 to 100"),
        (["--row-cost", "nan"], "--row-cost is nan; give a number"),
        (["--predictor", "hrad"], "1 of 1 answers of this trace have none"),
        (["--planners", "perl"], "did you mean 'pearl'"),
        (["--planners", ","], "--planners is empty"),
        (["--predictor", "tarot"], "choose from confidence"),
        (["--gamma", "0"], "from 1 to 64"),
    ],
)
def test_a_mistake_is_one_line_with_its_advice(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["simulate", "--tokens", "50", *arguments])

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
