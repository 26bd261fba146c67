"""What `specbranch quantize` refuses before it reads weights, and where it takes a model from."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.console import ProgressBar

quantize = import_module("specbranch.cli.commands.quantize")  # the package has the command by that name
runner = CliRunner()


def test_a_directory_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = runner.invoke(app, ["quantize", str(tmp_path / "model"), str(tmp_path)])

    assert done.exit_code == 2
    assert "name a directory that does not exist yet" in " ".join(done.stderr.split())


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    done = runner.invoke(app, ["quantize", str(tmp_path / "nothing"), str(tmp_path / "out")])

    assert done.exit_code == 2
    assert "there is no" in done.stderr and not (tmp_path / "out").exists()


def test_a_name_on_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with ProgressBar() as progress:
        found = quantize._directory("someone/model", progress)

    assert found == tmp_path
    assert asked == [("someone/model", quantize._FILES)]
