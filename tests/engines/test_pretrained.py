"""A model directory from a stranger: it may hold code and pickles, and none of them may run."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="models are loaded by torch")
transformers = pytest.importorskip("transformers", reason="models are loaded by Transformers")

from specbranch.engines.base import EngineOptions
from specbranch.engines.models import load_model, load_tokenizer
from specbranch.engines.torch import TorchEngine
from specbranch.errors import EngineError
from tests.root import ROOT

SOURCE = ROOT / "src"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({sprung!r}).write_text("code")

class TrapConfig(LlamaConfig):
    model_type = {kind!r}

class TrapModel(LlamaForCausalLM):
    config_class = TrapConfig

class TrapTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapModel"}


class Trap:
    """A directory like a model's; whatever of it is run leaves the file `sprung` behind."""

    def __init__(self, path: Path, kind: str, *, has_safetensors: bool) -> None:
        self.path = path / "model"
        self.sprung = path / "sprung"
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        model.save_pretrained(self.path)
        if not has_safetensors:
            (self.path / "model.safetensors").unlink()
        (self.path / "pytorch_model.bin").write_bytes(pickle.dumps(self))
        config = json.loads((self.path / "config.json").read_text())
        self._write("config.json", config | {"model_type": kind, "auto_map": AUTO_MAP})
        self._write("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["trap.TrapTokenizer", None]}})
        (self.path / "trap.py").write_text(CODE.format(sprung=str(self.sprung), kind=kind))

    def _write(self, name: str, document: object) -> None:
        (self.path / name).write_text(json.dumps(document))

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.sprung, "pickle")


@pytest.fixture(autouse=True)
def code_goes_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies code that it will run; it shall not meet the copy of an earlier test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_the_trap_works(tmp_path: Path) -> None:
    """Both halves of it, for who trusts everything."""
    trap = Trap(tmp_path, "trap", has_safetensors=True)

    transformers.AutoConfig.from_pretrained(trap.path, trust_remote_code=True)
    assert trap.sprung.read_text() == "code"
    with pytest.raises(RuntimeError, match="magic"):  # it is no model, as it finds out afterwards
        torch.load(trap.path / "pytorch_model.bin", weights_only=False, pickle_module=pickle)
    assert trap.sprung.read_text() == "pickle"


def test_code_beside_safetensors_is_not_run(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "llama", has_safetensors=True)

    model = load_model(str(trap.path))

    assert type(model) is transformers.LlamaForCausalLM
    assert not trap.sprung.exists()


def test_a_model_that_is_nothing_without_its_code_is_refused(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "trap", has_safetensors=True)

    with pytest.raises(EngineError, match="give a directory with"):
        TorchEngine(EngineOptions(str(trap.path)))
    assert not trap.sprung.exists()


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "llama", has_safetensors=False)

    with pytest.raises(EngineError, match=r"model\.safetensors.*give a directory with"):
        TorchEngine(EngineOptions(str(trap.path)))
    assert not trap.sprung.exists()


def test_the_code_of_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "llama", has_safetensors=True)

    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(str(trap.path))
    assert not trap.sprung.exists()


def test_nothing_else_loads_models_or_unpickles() -> None:
    """Every other way would have to be looked at as these were."""
    ways = re.compile(r"\bfrom_pretrained\(|\btorch\.load\(|\bpickle\b(?!\.)|allow_pickle=True|trust_remote_code=True")
    found = {
        path.name
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if ways.search(line) and "never pickle" not in line
    }

    assert found == {"models.py"}
