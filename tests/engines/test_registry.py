"""Engines by name: ours, registered ones, and those of other packages, found as a person's installer leaves them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specbranch.engines import registry
from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.engines.registry import ENGINES, engine_for, engine_names, open_engine, register_engine
from specbranch.errors import EngineError
from specbranch.simulation.scripted import ScriptedEngine
from tests.toys import random_script

Install = Callable[..., None]

OPENER = """
from specbranch.simulation.scripted import ScriptedEngine
from tests.toys import random_script

def open_toy(options):
    return ScriptedEngine(random_script(0, 7), row_limit=options.row_limit)

class ToyEngine(ScriptedEngine):
    def __init__(self, options):
        super().__init__(random_script(0, 9), row_limit=options.row_limit)
"""


def open_scripted(options: EngineOptions) -> DraftEngine:
    return ScriptedEngine(random_script(0, 5))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers or finds is forgotten after it."""
    monkeypatch.setattr(registry, "_OPENERS", {name: registry._OPENERS[name] for name in ENGINES})
    registry._discover.cache_clear()
    yield
    registry._discover.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with entry points of our group on the path, as an installer does."""

    def install_package(package: str, points: dict[str, str], source: str = OPENER) -> None:
        module = package.replace("-", "_")
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[specbranch.engines]", *lines, ""]))
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    return install_package


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_our_own_engines_have_names_and_models_choose_among_them() -> None:
    assert ENGINES == ("llamacpp", "torch")
    assert set(ENGINES) <= set(engine_names())
    assert (engine_for("x.gguf"), engine_for("org/model")) == ("llamacpp", "torch")


def test_a_registered_engine_is_listed_and_opened_by_its_name() -> None:
    register_engine("toy", open_scripted)

    assert "toy" in engine_names()
    assert open_engine("toy", EngineOptions("any")).info.vocab_len == 5


@pytest.mark.parametrize("name", ["", "Toy", "9toy", "toy engine", "toy/1", "t" * 65, None])
def test_a_name_that_would_be_hard_to_type_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match="cannot be the name of an engine; use lower-case letters"):
        register_engine(name, open_scripted)


def test_a_name_is_given_once_unless_to_the_same_opener() -> None:
    register_engine("toy", open_scripted)
    register_engine("toy", open_scripted)

    with pytest.raises(EngineError, match="called 'toy' exists already"):
        register_engine("toy", lambda options: open_scripted(options))
    with pytest.raises(EngineError, match="called 'torch' exists already"):
        register_engine("torch", open_scripted)
    with pytest.raises(EngineError, match="'other' cannot be opened: 7 is not callable"):
        register_engine("other", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "advice"), [("tourch", "did you mean 'torch'?"), ("abacus", "choose from llamacpp, torch")]
)
def test_an_unknown_name_is_answered_with_the_nearest_or_all(name: str, advice: str) -> None:
    with pytest.raises(EngineError) as refusal:
        open_engine(name, EngineOptions("x"))

    assert str(refusal.value).startswith(f"no engine is called {name!r}; {advice}")


@pytest.mark.parametrize(("target", "vocab_len"), [("toy_engines:open_toy", 7), ("toy_engines:ToyEngine", 9)])
def test_an_engine_of_another_package_is_found_when_it_is_asked_for(
    install: Install, target: str, vocab_len: int
) -> None:
    install("toy-engines", {"toy": target})

    info = open_engine("toy", EngineOptions("any", row_limit=3)).info

    assert (info.vocab_len, info.row_limit) == (vocab_len, 3)
    assert "toy" in engine_names()


def test_other_packages_are_not_loaded_for_an_engine_of_ours(install: Install) -> None:
    install("toy-engines", {"toy": "toy_engines:open_toy"})
    register_engine("mine", open_scripted)

    open_engine("mine", EngineOptions("any"))

    assert "toy_engines" not in sys.modules


@pytest.mark.parametrize(
    ("name", "target", "source", "cause"),
    [
        ("toy", "toy_engines:open_toy", "import no_such_library", "ModuleNotFoundError: .*no_such_library"),
        ("toy", "toy_engines:no_such_thing", OPENER, "AttributeError: .*no_such_thing"),
        ("toy", "toy_engines:SIZE", "SIZE = 7", "EngineError: .*7 is not callable"),
        ("torch", "toy_engines:open_toy", OPENER, "EngineError: .*'torch' exists already"),
        ("Toy", "toy_engines:open_toy", OPENER, "EngineError: 'Toy' cannot be the name"),
    ],
)
def test_a_broken_engine_of_another_package_is_one_warning_and_breaks_nothing(
    install: Install, caplog: pytest.LogCaptureFixture, name: str, target: str, source: str, cause: str
) -> None:
    install("toy-engines", {name: target, "good": "good_engines:open_toy"}, source)
    Path(sys.path[0], "good_engines.py").write_text(OPENER)

    assert {*ENGINES, "good"} == set(engine_names()) == set(engine_names())
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"the package 'toy-engines' offers a draft engine {name!r} that cannot be used")
    assert re.search(cause, warning)
    assert open_engine("good", EngineOptions("any")).info.vocab_len == 7


def test_a_package_whose_entry_points_cannot_be_read_hides_no_other(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("bad-engines", {})
    Path(sys.path[0], "bad_engines-1.0.dist-info", "entry_points.txt").write_text("[specbranch.engines]\nno pair\n")
    install("toy-engines", {"toy": "toy_engines:open_toy"})

    assert {*ENGINES, "toy"} == set(engine_names())
    (warning,) = warnings_of(caplog)
    assert warning.startswith("ignoring the package 'bad-engines': its entry points cannot be read")


def test_who_asks_for_a_broken_engine_is_told_which_package_to_repair(install: Install) -> None:
    install("toy-engines", {"toy": "toy_engines:open_toy"}, "import no_such_library")

    with pytest.raises(EngineError, match=r"'toy-engines' offers .* 'toy' .*no_such_library.*; update or uninstall"):
        open_engine("toy", EngineOptions("any"))


def test_the_registry_needs_no_heavy_library() -> None:
    program = (
        "import sys; from specbranch.engines.registry import engine_names; engine_names(); "
        "import specbranch.engines.torch; "
        "assert not {'torch', 'transformers', 'llama_cpp'} & set(sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
