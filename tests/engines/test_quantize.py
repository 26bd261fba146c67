"""A dense checkpoint written again in 8 bits: what is rounded, by how much, what vLLM reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="quantizing needs torch")
transformers = pytest.importorskip("transformers", reason="quantizing needs Transformers")

from safetensors.torch import load_file, save_file

from specbranch.engines.base import EngineOptions
from specbranch.engines.models import weight_bytes
from specbranch.engines.quantize import MAX_INT8, QuantizeError, quantize_checkpoint, quantize_weight
from specbranch.engines.registry import open_engine
from specbranch.engines.vocabulary import check_same_vocabulary
from specbranch.errors import EngineError

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
INDEX = "model.safetensors.index.json"


def silent(stage: str, done: int | None, total: int | None) -> None:
    pass


def write_dense(path: Path, is_tied: bool = False, shard: str = "1GB") -> Path:
    torch.manual_seed(5)
    config = transformers.Qwen2Config(**SHAPE, tie_word_embeddings=is_tied)
    transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    return path


def tensors_of(path: Path) -> dict[str, Any]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def quantized(source: Path) -> Path:
    out = source.with_name("int8")
    quantize_checkpoint(source, out, silent)
    return out


def test_no_weight_moves_by_more_than_half_of_its_channels_scale() -> None:
    torch.manual_seed(1)
    weight = torch.randn(64, 96) * torch.logspace(-4, 2, 64)[:, None]

    integers, scales = quantize_weight(weight)

    assert integers.dtype == torch.int8 and scales.shape == (64, 1)
    # Float32 keeps 24 bits of a quotient of at most 127.
    assert ((integers * scales - weight).abs() <= (0.5 + MAX_INT8 * 2**-22) * scales).all()
    assert (integers.abs().amax(dim=1) == MAX_INT8).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    integers, scales = quantize_weight(torch.zeros(3, 8))

    assert not integers.any() and (scales > 0).all()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_every_linear_layer_and_the_output_layer_are_in_8_bits(tmp_path: Path, is_tied: bool, shard: str) -> None:
    source = write_dense(tmp_path / "dense", is_tied, shard)
    out = quantized(source)
    dense, found = tensors_of(source), tensors_of(out)
    dense.setdefault("lm_head.weight", dense["model.embed_tokens.weight"])
    matrices = {name for name, tensor in dense.items() if tensor.dim() == 2} - {"model.embed_tokens.weight"}

    assert len(matrices) == 2 * 7 + 1
    assert found.keys() == dense.keys() | {f"{name}_scale" for name in matrices}
    for name, tensor in dense.items():
        if name in matrices:
            assert found[name].dtype == torch.int8 and found[f"{name}_scale"].shape == (len(tensor), 1)
            assert ((found[name] * found[f"{name}_scale"] - tensor).abs() <= 0.501 * found[f"{name}_scale"]).all()
        else:
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_config_says_what_vllm_must_know_and_keeps_the_rest(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense", is_tied=True)
    out = quantized(source)
    found = config_of(out)
    section = found.pop("quantization_config")
    group = section["config_groups"]["group_0"]

    assert found == {**config_of(source), "tie_word_embeddings": False}
    assert (section["quant_method"], section["format"], section["ignore"]) == (
        "compressed-tensors",
        "int-quantized",
        [],
    )
    assert group["targets"] == ["Linear", "re:.*lm_head"]
    assert (group["weights"]["strategy"], group["weights"]["num_bits"]) == ("channel", 8)
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)


def test_shards_have_an_index_and_other_files_come_along(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense", shard="8KB")
    for file in source.glob("*.safetensors"):
        file.chmod(0o644)
    (source / "model.bin").write_bytes(b"a second copy of the weights")
    out = quantized(source)
    places = json.loads((out / INDEX).read_text())["weight_map"]

    assert {file.stat().st_mode & 0o777 for file in out.glob("*.safetensors")} == {0o644}
    assert places.keys() == tensors_of(out).keys() and len(set(places.values())) > 1
    assert all(name in load_file(out / file) for name, file in places.items())
    assert {file.name for file in source.iterdir()} - {file.name for file in out.iterdir()} == {"model.bin"}


def test_memory_is_that_of_the_files_whatever_the_dtype_of_the_rest(tmp_path: Path) -> None:
    """Activations follow --dtype; the weights do not."""
    out = quantized(write_dense(tmp_path / "dense"))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))

    assert weight_bytes(str(out)) == weight_bytes(str(out), "float32") == weight_bytes(str(out), "bfloat16") == size


def test_the_vocabulary_is_still_compared(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    out = quantized(source)

    check_same_vocabulary(str(out), str(source))

    (out / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}))
    with pytest.raises(ValueError, match="cannot draft for"):
        check_same_vocabulary(str(out), str(source))


@pytest.mark.parametrize("dtype", ["auto", "int8", "bfloat16"])
def test_the_torch_engine_wants_the_dense_checkpoint_as_its_draft(tmp_path: Path, dtype: str) -> None:
    out = quantized(write_dense(tmp_path / "dense"))

    with pytest.raises(EngineError, match=r"quantized already \(compressed-tensors\).*give the dense checkpoint"):
        open_engine("torch", EngineOptions(model=str(out), dtype=dtype))


def test_a_checkpoint_in_8_bits_is_not_quantized_again(tmp_path: Path) -> None:
    out = quantized(write_dense(tmp_path / "dense"))

    with pytest.raises(QuantizeError, match="is quantized already \\(compressed-tensors\\); give the dense"):
        quantize_checkpoint(out, tmp_path / "again", silent)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    shape = {**SHAPE, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape)).save_pretrained(tmp_path / "moe")

    with pytest.raises(QuantizeError, match="mixture of experts"):
        quantize_checkpoint(tmp_path / "moe", tmp_path / "out", silent)


def test_weights_that_are_no_linear_layer_are_refused(tmp_path: Path) -> None:
    shape = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")

    with pytest.raises(QuantizeError, match="neither a linear layer nor the input embedding"):
        quantize_checkpoint(tmp_path / "gpt2", tmp_path / "out", silent)


def test_files_that_lack_a_layer_of_the_model_are_refused(tmp_path: Path) -> None:
    source = write_dense(tmp_path / "dense")
    tensors = tensors_of(source)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(QuantizeError, match=r"hold no model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize_checkpoint(source, tmp_path / "out", silent)


def test_a_directory_without_a_config_or_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"no config\.json"):
        quantize_checkpoint(tmp_path, tmp_path / "out", silent)

    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(QuantizeError, match="no weights in safetensors"):
        quantize_checkpoint(tmp_path, tmp_path / "out", silent)


def test_what_is_there_is_not_overwritten_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_dense(tmp_path / "dense"), tmp_path / "out"
    out.mkdir()
    with pytest.raises(QuantizeError, match="exists"):
        quantize_checkpoint(source, out, silent)

    out.rmdir()
    monkeypatch.setattr("specbranch.engines.quantize.save_file", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        quantize_checkpoint(source, out, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")
