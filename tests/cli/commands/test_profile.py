"""`specbranch profile` as a person and as a machine would call it."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.engines.base import EngineOptions
from specbranch.errors import EngineError
from specbranch.simulation.scripted import ScriptedEngine
from tests.models import model_path
from tests.toys import random_script

runner = CliRunner()

FIGURES = {
    "model", "engine", "device", "dtype", "threads", "context", "vocab_len", "rows", "fit", "fork_us",
    "fork_copies_tokens", "prefill_tokens_per_s", "bandwidth_gb_per_s", "weight_bytes", "bound_ms", "bound_share",
    "noise", "limit", "provenance",
}  # fmt: skip
SMALL = ["--rows", "1,2,3", "--context", "8", "--steps", "2"]


class Opened:
    """Opens scripted engines and remembers with what options."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, EngineOptions]] = []
        self.is_broken = False

    def __call__(self, name: str, options: EngineOptions) -> ScriptedEngine:
        self.calls.append((name, options))
        if self.is_broken:
            raise EngineError("the device is gone")
        return ScriptedEngine(random_script(0, 5))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Scripted engines in place of real ones, and a memory of 1 GB/s."""
    module = importlib.import_module("specbranch.cli.commands.plan")
    opened = Opened()
    monkeypatch.setattr(module, "open_engine", opened)
    monkeypatch.setattr(module, "read_bandwidth", lambda *_: 1e9)
    return opened


@pytest.fixture
def same_cores() -> Iterator[set[int]]:
    """The cores of this process, given back after the test."""
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


def test_json_is_one_document_on_the_last_line(opened: Opened) -> None:
    result = runner.invoke(app, ["profile", "some.gguf", *SMALL, "--json"])

    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert set(document) == FIGURES
    assert list(document["rows"]) == ["1", "2", "3"]
    assert (document["engine"], document["context"], document["weight_bytes"]) == ("llamacpp", 8, None)
    assert document["fork_copies_tokens"] is False


def test_the_table_shows_every_row_count_and_the_limit(opened: Opened) -> None:
    result = runner.invoke(app, ["profile", "some.gguf", *SMALL])

    assert result.exit_code == 0
    assert all(word in result.stdout for word in ("median ms", "p10", "p90", "fit:", "prefill:", "limit:"))
    assert "the size of this engine's weights is unknown" in result.stdout
    assert "…" not in result.stdout


def test_options_reach_the_engine(opened: Opened) -> None:
    opened.is_broken = True  # the options are enough
    call = ["profile", "a/b", "--engine", "torch", "--threads", "3", "--dtype", "bfloat16", "--rows", "1,200"]
    result = runner.invoke(app, [*call, "--context", "20000"])

    assert (result.exit_code, result.stderr) == (2, "error: the device is gone\n")
    [(name, options)] = opened.calls
    assert (name, options.model, options.device, options.dtype) == ("torch", "a/b", "cpu", "bfloat16")
    assert (options.threads, options.row_limit, options.max_handles) == (3, 200, 201)
    assert options.max_tokens == 20200


def test_the_engine_suits_the_model_unless_told(opened: Opened) -> None:
    runner.invoke(app, ["profile", "some.gguf", *SMALL])
    runner.invoke(app, ["profile", "some/model", *SMALL])

    assert [name for name, _ in opened.calls] == ["llamacpp", "torch"]


def test_the_process_stays_on_the_given_cores(opened: Opened, same_cores: set[int]) -> None:
    core = max(same_cores)
    result = runner.invoke(app, ["profile", "some.gguf", *SMALL, "--cores", str(core), "--json"])

    assert os.sched_getaffinity(0) == {core}
    assert json.loads(result.stdout)["threads"] == 1


def test_the_plot_is_drawn(opened: Opened, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.png"
    result = runner.invoke(app, ["profile", "some.gguf", *SMALL, "--plot", str(path)])

    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1,two"], "whole numbers separated by commas"),
        (["--rows", "1"], "at least one larger"),
        (["--rows", "2,4"], "give 1 and"),
        (["--rows", "0,1"], "give 1 and"),
        (["--cores", "0;1"], "whole numbers"),
        (["--cores", "99999"], "this process may use"),
        (["--cores", f"{min(os.sched_getaffinity(0))},99999"], "this process may use"),
        (["--cores", "99999999999999"], "this process may use"),
        (["--engine", "abacus"], "choose from llamacpp, torch"),
        (["--threads", "0"], "at least 1"),
    ],
)
def test_a_mistake_is_one_line_with_its_advice(arguments: list[str], message: str) -> None:
    cores = os.sched_getaffinity(0)
    result = runner.invoke(app, ["profile", "absent.gguf", *arguments])

    assert result.exit_code == 2
    assert message in result.stderr
    assert os.sched_getaffinity(0) == cores
    assert len(result.stderr.splitlines()) == 1


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_loaded(opened: Opened, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = runner.invoke(app, ["profile", "some.gguf", "--plot", str(tmp_path / "absent" / "plot.png")])

    assert result.exit_code == 2
    assert "there is no directory" in result.stderr
    assert not opened.calls


def test_an_absent_model_is_one_line() -> None:
    pytest.importorskip("llama_cpp")
    result = runner.invoke(app, ["profile", "absent.gguf"])

    assert result.exit_code == 2
    assert "no model 'absent.gguf' on this machine" in result.stderr


def test_a_real_model_is_profiled() -> None:
    pytest.importorskip("llama_cpp")
    path = model_path("smollm2-135m")
    call = ["profile", str(path), "--rows", "1,2,4", "--steps", "2", "--context", "32", "--threads", "1", "--json"]
    result = runner.invoke(app, call)

    assert result.exit_code == 0
    document = json.loads(result.stdout.splitlines()[-1])
    assert set(document) == FIGURES
    assert set(document["rows"]["4"]) == {"median_ms", "p10_ms", "p90_ms"}
    assert (document["engine"], document["device"], document["threads"]) == ("llamacpp", "cpu", 1)
    assert document["fork_copies_tokens"] is False
    assert document["bound_ms"] == pytest.approx(document["weight_bytes"] / document["bandwidth_gb_per_s"] / 1e6)
    assert document["rows"]["1"]["p10_ms"] <= document["rows"]["1"]["median_ms"] <= document["rows"]["1"]["p90_ms"]
