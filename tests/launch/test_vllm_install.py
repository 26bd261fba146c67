"""Which targets verify slowly on which CPUs; `generate`, `serve` and `plan` say so before anything loads."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.preflight import Preflight
from specbranch.errors import SpecBranchError
from specbranch.launch import vllm_install
from specbranch.launch.vllm_install import computed_type, has_int8_output, slow_type, types_here, types_to_measure
from specbranch.plugins.vllm import installed

VNNI = ["avx2", "avx512f", "avx512_vnni"]
EIGHT = {"num_bits": 8, "type": "int"}
BOTH = {"weights": EIGHT, "input_activations": EIGHT}


def quantized(targets: list[str], ignore: list[str], **group: Any) -> dict[str, Any]:
    section = {"config_groups": {"group_0": {"targets": targets, **(group or BOTH)}}, "ignore": ignore}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "compressed-tensors", **section}}


INT8 = quantized(["Linear", "re:.*lm_head"], [])


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", "half", "float16"])
@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"torch_dtype": "float32"}, {}])
def test_a_dense_target_in_16_bits_is_slow_where_the_cpu_emulates_them(
    dtype: str | None, config: dict[str, Any]
) -> None:
    line = slow_type(VNNI, config, dtype, "big")

    assert line is not None and "\n" not in line
    assert "specbranch quantize big DIR" in line and "--dtype float32" in line


@pytest.mark.parametrize("named", [[*VNNI, "avx512_bf16"], [*VNNI, "amx_bf16"], []])
def test_nothing_is_said_where_the_cpu_has_bfloat16_or_is_unknown(named: list[str]) -> None:
    assert slow_type(named, {"dtype": "bfloat16"}, "auto", "big") is None


@pytest.mark.parametrize("dtype", ["float32", "float", "torch.float32"])
def test_nothing_is_said_of_32_bits(dtype: str) -> None:
    assert slow_type(VNNI, {"dtype": "bfloat16"}, dtype, "big") is None
    assert slow_type(VNNI, quantized(["Linear"], ["lm_head"]), dtype, "big") is None


def test_nothing_is_said_of_an_int8_target_with_an_int8_output_layer() -> None:
    assert has_int8_output(INT8)
    assert slow_type(VNNI, INT8, "auto", "big") is None


@pytest.mark.parametrize(
    "config",
    [
        quantized(["Linear"], ["lm_head"]),
        quantized(["Linear"], []),  # to vLLM the output layer is no linear layer
        quantized(["Linear", "re:.*lm_head"], ["re:lm.*"]),
        quantized(["Linear", "re:.*lm_head"], [], weights={"num_bits": 4, "type": "int"}, input_activations=None),
        quantized(["re:.*lm_head"], [], weights=EIGHT, input_activations={"num_bits": 8, "type": "float"}),
        {**INT8, "tie_word_embeddings": True},
        {"dtype": "float16", "quantization_config": {"quant_method": "awq"}},
    ],
)
def test_a_quantized_target_is_slow_if_its_output_layer_is_not_in_int8(config: dict[str, Any]) -> None:
    line = slow_type(VNNI, config, "auto", "big")

    assert line is not None and "\n" not in line
    assert "lm_head" in line and "specbranch quantize DENSE DIR" in line


def test_auto_is_never_32_bits_in_vllm_on_a_cpu() -> None:
    assert computed_type({"dtype": "float32"}, "auto") == "bfloat16"
    assert computed_type({"torch_dtype": "torch.float16"}, None) == "float16"


def test_a_plan_measures_the_types_that_fit_the_fastest_first() -> None:
    dense = {"dtype": "bfloat16"}

    assert types_to_measure(VNNI, dense, "auto", lambda kind: True) == ["float32", "bfloat16"]
    assert types_to_measure([*VNNI, "amx_bf16"], dense, "auto", lambda kind: True) == ["bfloat16", "float32"]
    assert types_to_measure(VNNI, dense, "auto", lambda kind: False) == ["bfloat16"]
    assert types_to_measure(VNNI, dense, "float32", lambda kind: True) == ["float32"]
    assert types_to_measure(VNNI, INT8, "auto", lambda kind: True) == ["auto"]
    assert types_to_measure(VNNI, None, "auto", lambda kind: True) == ["auto"]


def test_a_type_fits_if_its_weights_and_the_drafts_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    pair = str(tmp_path / "target"), str(tmp_path / "draft")

    for free, has_both in ((3000, True), (2999, False), (None, True)):
        monkeypatch.setattr("specbranch.machine.free_host_memory", lambda free=free: free)
        assert ("float32" in types_here(*pair, "auto")) == has_both
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: False)
    assert types_here(*pair, "auto") == ["auto"]


@pytest.mark.parametrize("command", ["generate", "serve", "plan"])
@pytest.mark.parametrize(("dtype", "is_said"), [("auto", True), ("float32", False)])
def test_commands_that_draft_say_it_before_anything_loads(
    command: str, dtype: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> Any:
        raise SpecBranchError("now it would load")

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx2 avx512f avx512_vnni")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    monkeypatch.setattr(vllm_install, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(Preflight, "run", lambda self: None)
    for module, name in (("generate", "LocalPair"), ("serve", "_run"), ("plan", "survey_types")):
        monkeypatch.setattr(import_module(f"specbranch.cli.commands.{module}"), name, load)
    words = ["--prompt", "x"] if command == "generate" else []
    done = CliRunner().invoke(app, [command, str(tmp_path), "--draft", "d.gguf", "--dtype", dtype, *words])

    assert ("vLLM emulates bfloat16" in done.stderr) == is_said
    assert done.stderr.strip().endswith("error: now it would load")


def test_doctor_says_it_of_a_target_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx2 avx512f avx512_vnni")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    monkeypatch.setattr(vllm_install, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(Preflight, "findings", lambda self: [])
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])

    assert "specbranch quantize" in json.loads(done.stdout)["choices"]["target data type"]


def test_nothing_is_said_on_a_gpu_or_of_a_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    assert vllm_install.slow_type_here("/nowhere/at/all", "auto") is None

    monkeypatch.setattr(installed, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(vllm_install, "read_config", lambda model: {"dtype": "bfloat16"})
    assert vllm_install.slow_type_here("big", "auto") is None
