"""vLLM's command line and the arguments of `vllm.LLM` say the same in two ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbranch.errors import FlagError
from specbranch.launch import vllm_flags
from specbranch.launch.vllm_flags import (
    Flags,
    KnownArguments,
    check_arguments,
    check_flags,
    flags_of,
    known_arguments,
    read_arguments,
)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", {}),
        ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("-tp=2 -q awq", {"tensor_parallel_size": 2, "quantization": "awq"}),
        ("--max_model_len=512 --seed -1", {"max_model_len": 512, "seed": -1}),
        ("--enforce-eager --dtype half", {"enforce_eager": True, "dtype": "half"}),
        ("--dtype half --no-enable-prefix-caching", {"dtype": "half", "enable_prefix_caching": False}),
        ("--allowed-media-domains a.org b.org", {"allowed_media_domains": ["a.org", "b.org"]}),
        (
            '--compilation-config {"level":3} --compilation-config.cudagraph_mode FULL',
            {"compilation_config": {"level": 3, "cudagraph_mode": "FULL"}},
        ),
        ("--seed 1 --seed 2", {"seed": 2}),
    ],
)
def test_flags_become_arguments(words: str, arguments: dict[str, Any]) -> None:
    assert Flags(words.split()).arguments() == arguments


@pytest.mark.parametrize(
    ("words", "cause"),
    [(["word"], "unexpected word 'word'"), (["2", "--seed", "1"], "unexpected word '2'"), (["-O3"], "long name")],
)
def test_what_is_no_flag_is_refused(words: list[str], cause: str) -> None:
    with pytest.raises(FlagError, match=cause):
        Flags(words).arguments()


def test_arguments_become_flags_and_come_back() -> None:
    arguments = {"tensor_parallel_size": 2, "enforce_eager": True, "enable_lora": False, "rope": {"a": 1}, "dtype": "x"}
    words = flags_of(arguments)

    assert words[:4] == ["--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-lora"]
    assert Flags(words).arguments() == arguments


ENGINE = """
class EngineArgs:
    model: str = "x"
    max_model_len: int | None = None
    dtype: ModelDType = "auto"
    gpu_memory_utilization: float = 0.9
    sizes: list[int] | None = None
    @staticmethod
    def add_cli_args(parser):
        group.add_argument("--max-model-len", **kwargs)
        group.add_argument("--tensor-parallel-size", "-tp", **kwargs)
        group.add_argument(name, **kwargs)
"""
FRONTEND = """
class FrontendArgs:
    port: int = 8000
    allowed_origins: list[str] = field(default_factory=list)
def make_arg_parser(parser):
    parser.add_argument("--headless")
"""
LLM = """
class LLM:
    def __init__(self, model: str, *, runner: str = "auto", **kwargs): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_flags, "_MIN_FIELDS", 3)
    for name, text in {
        "engine/arg_utils.py": ENGINE,
        "entrypoints/launchers/cli_args.py": FRONTEND,
        "entrypoints/llm.py": LLM,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def known(package: Path) -> KnownArguments:
    found = read_arguments(package)
    assert found is not None
    return found


def test_the_source_names_flags_arguments_and_numbers(known: KnownArguments) -> None:
    assert {"-tp", "--max-model-len", "--headless", "--port", "--gpu-memory-utilization"} <= known.flags
    assert {"model", "runner", "max_model_len", "sizes"} <= known.arguments
    assert known.numbers == {"max_model_len", "gpu_memory_utilization", "port"}


def test_an_older_layout_is_read_too(package: Path) -> None:
    old = package / "entrypoints/openai/cli_args.py"
    old.parent.mkdir()
    (package / "entrypoints/launchers/cli_args.py").rename(old)
    found = read_arguments(package)

    assert found is not None
    assert "--port" in found.flags


@pytest.mark.parametrize("name", ["engine/arg_utils.py", "entrypoints/llm.py"])
def test_a_source_that_is_laid_out_otherwise_is_not_guessed_at(package: Path, name: str) -> None:
    (package / name).write_text("x = 1")
    assert read_arguments(package) is None
    (package / name).write_text("no python (")
    assert read_arguments(package) is None


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "512"],
        ["--max_model_len=1.5k"],
        ["--max-model-len", "auto"],
        ["--max-model-len", "-1"],
        ["-tp", "2"],
        ["-O3"],
        ["--no-headless"],
        ["--max-model", "3"],  # vLLM takes the first letters too
        ["--allowed-origins.x", "y"],
        ["--allowed-origins+", "y"],
        ["--headless"],
    ],
)
def test_what_vllm_takes_is_not_refused(known: KnownArguments, words: list[str]) -> None:
    check_flags(Flags(words), known)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modl-len", "3"], "vLLM has no flag --max-modl-len; did you mean --max-model-len?"),
        (["--port", "1", "--nonsense"], "vLLM has no flag --nonsense; `vllm serve --help` lists them"),
        (["--no-haedless"], "vLLM has no flag --no-haedless"),
        (["--max-model-len", "abc"], "--max-model-len is 'abc'; give a number"),
        (["--port=eight"], "--port is 'eight'; give a number"),
    ],
)
def test_what_vllm_does_not_have_is_refused(known: KnownArguments, words: list[str], message: str) -> None:
    with pytest.raises(FlagError) as refused:
        check_flags(Flags(words), known)
    assert message in str(refused.value)


def test_arguments_of_the_python_class_are_checked_alike(known: KnownArguments) -> None:
    check_arguments({"max_model_len": 512, "runner": "generate", "gpu_memory_utilization": "0.5"}, known)
    with pytest.raises(FlagError, match="no argument 'max_modl_len'; did you mean max_model_len"):
        check_arguments({"max_modl_len": 512}, known)
    with pytest.raises(FlagError, match="max_model_len is 'abc'"):
        check_arguments({"max_model_len": "abc"}, known)


def test_the_installed_vllm_is_read_without_importing_it() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    program = (
        "import sys; from specbranch.launch.vllm_flags import known_arguments as known; "
        "assert {'--max-model-len', '-tp', '--port', '--enforce-eager'} <= known().flags; "
        "assert {'max_model_len', 'enforce_eager'} <= known().arguments; assert 'port' in known().numbers; "
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_vllm_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    known_arguments.cache_clear()
    try:
        assert known_arguments() is None
    finally:
        known_arguments.cache_clear()
