"""Load a model for the torch engine and choose the fastest dtype by timing its own layers.

The dtype that is fastest on one CPU can be a hundred times slower on another, if the library has no kernel for it
there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.engines.base import DTYPES, EngineInfo, EngineOptions
from specbranch.engines.kv_cache import CacheSize, cache_size
from specbranch.engines.models import load_model, local_model, read_config
from specbranch.engines.torch.kv_store import KVStore
from specbranch.engines.torch.linear import PACKED, MergedLinear, can_int8, pack_linears, packed_bytes
from specbranch.engines.torch.model import FusedModel, LinearType, can_fuse
from specbranch.engines.torch.plain import PlainModel, fix_rotary, require_known_attention, text_config, text_part
from specbranch.engines.torch.selftest import NUM_SLOTS, SelfTest
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.errors import EngineError, first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import linear as plain_linear
    from transformers import GgufConfig

log = logging.getLogger(__name__)
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = (1, 8)  # typical row counts of a draft step
_SAMPLE = 32 << 20  # weights to time, few enough for one second
_TOO_SLOW = 10.0  # skip a dtype that takes this many times as long as float32 for one layer,
_TOO_SLOW_S = 1.0  # if the sample would take at least this long: times of a single layer are noisy
_SPAN_S = 0.1  # how long to time one dtype for one row count
_MIN_RUNS = 3
Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run on the torch engine."""

    name: str  # of its class in Transformers
    model: Any  # a FusedModel or a PlainModel
    dtype: str  # of its weights
    config: Any  # the Transformers config of its language model
    self_test: SelfTest


def load(options: EngineOptions) -> LoadedModel:
    """Load the model that the options name, in their dtype, replace its attention by ours, and return the model.

    Raises `EngineError` if the torch engine cannot run it.
    """
    given, name = load_plain(options)
    with _explained(options):
        require_known_attention(given)
        self_test, config = SelfTest(given), text_config(given)
        model, dtype = _converted(given, self_test, options)
    return LoadedModel(name, model, dtype, config, self_test)


def load_plain(options: EngineOptions) -> tuple[Any, str]:
    """Load the model that the options name, as Transformers has it, and return it with the name of its class.

    Its rotary frequencies are the same for all sequences. Raises `EngineError` if it cannot be loaded.
    """
    _require_dtype(options)
    _require_dense(options)
    source, arguments = _source(options.model)
    is_here = local_model(options.model) is not None
    options.on_progress(
        "loading weights" if is_here else f"fetching {options.model} from the Hugging Face hub, or its cache"
    )
    with _explained(options):
        given = text_part(load_model(source, dtype=PLAIN.get(options.dtype, "auto"), **arguments))
        fix_rotary(given, options.max_tokens)
        return given.to(options.device).eval(), type(given).__name__


@contextlib.contextmanager
def _explained(options: EngineOptions) -> Iterator[None]:
    """Raise any error of Transformers or torch as `EngineError`, which says what was tried."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"cannot load {options.model!r} on {options.device}: {first_line(error)}; give a directory with "
            "config.json and safetensors, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face "
            "hub"
        ) from error


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a step of one row reads.

    The input embedding counts only if the output layer has the same weights: of the embedding itself a step reads one
    row.
    """
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_read = getattr(output, "weight", None) is embedding
    plain: int = sum(
        weight.numel() * weight.element_size() for weight in model.parameters() if weight is not embedding or is_read
    )
    return plain + packed_bytes(model)


def engine_info(options: EngineOptions, model: Any, dtype: str, vocab_len: int, max_tokens: int) -> EngineInfo:
    """Return what an engine says of itself, for a loaded model and the size of its cache."""
    return EngineInfo(
        model=options.model,
        device=options.device,
        vocab_len=vocab_len,
        row_limit=options.row_limit,
        max_handles=options.max_handles,
        max_tokens=max_tokens,
        dtype=dtype,
        weight_bytes=weight_bytes(model),
        vocab_fingerprint=read_fingerprint(options.model),
    )


def size_cache(options: EngineOptions, bytes_per_token: int, free_host_bytes: int | None) -> CacheSize:
    """Return the size of a cache on the device of the options; `free_host_bytes` counts if that is no CUDA device."""
    is_cuda = options.device.startswith("cuda")
    free_bytes = torch.cuda.mem_get_info(options.device)[0] if is_cuda else free_host_bytes
    return cache_size(options.max_tokens, bytes_per_token, free_bytes, is_cpu=not is_cuda)


def _converted(model: Any, self_test: SelfTest, options: EngineOptions) -> tuple[Any, str]:
    """Replace a model's layers by ours, and convert its weights to the options' dtype; return model and dtype.

    For `auto` on a CPU, choose the fastest dtype by timing; elsewhere, keep the model's own. A model that keeps its own
    layers is tested before they are packed, because 8 bits hide small faults.
    """
    dtype = options.dtype
    if dtype == "auto" and options.device == "cpu":
        options.on_progress("timing data types")
        choice = fastest_dtype(model)
        log.info("draft on the CPU in %s", choice)
        dtype = choice.dtype
    if dtype in PACKED:
        options.on_progress(f"packing weights in {dtype}")
        stored = model.dtype
        wrapped = _wrap_model(model.float(), PACKED[dtype], options)
        if isinstance(wrapped, PlainModel):
            self_test.check_model(
                wrapped, KVStore(NUM_SLOTS, options.device, by_head=True), str(stored).partition(".")[2]
            )
        packed = pack_linears(wrapped, PACKED[dtype])
        if isinstance(packed, FusedModel):
            packed.store_embedding(stored)
        return packed, dtype
    # Weights only: buffers of a model, such as its rotary frequencies, need 32 bits.
    for weight in model.parameters():
        weight.data = weight.data.to(PLAIN.get(dtype, weight.dtype))
    dtype = str(model.dtype).removeprefix("torch.")
    return _wrap_model(model, MergedLinear, options), dtype


def _wrap_model(model: Any, kind: LinearType, options: EngineOptions) -> Any:
    return FusedModel(model, kind) if can_fuse(model, options.max_tokens) else PlainModel(model)


def _require_dtype(options: EngineOptions) -> None:
    if options.dtype not in DTYPES:
        raise EngineError(f"there is no dtype {options.dtype!r}; give {', '.join(DTYPES)}")
    if options.dtype in PACKED and options.device != "cpu":
        raise EngineError(f"dtype {options.dtype} is for the CPU; give auto, {', '.join(PLAIN)}")
    if options.dtype in PACKED and not can_int8():
        raise EngineError(
            f"this build of torch has no kernels for dtype {options.dtype}; give auto or bfloat16, or use the "
            "llamacpp engine with a GGUF file"
        )


def _require_dense(options: EngineOptions) -> None:
    """Raise `EngineError` if a checkpoint is quantized and the options would convert its weights to another dtype."""
    section = (read_config(options.model) or {}).get("quantization_config")
    if section and (options.device == "cpu" or options.dtype != "auto"):
        raise EngineError(
            f"{options.model} is quantized already ({section.get('quant_method', 'an unknown method')}), and the "
            "torch engine quantizes dense weights itself; give the dense checkpoint that it was made from"
        )


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """Return the arguments with which `load_model` loads a model: its source, and a dict of keyword arguments.

    `model` is a directory, a GGUF file, a directory with one GGUF file, or a name on the Hugging Face hub. A path may
    be given below $SPECBRANCH_MODELS. For a GGUF file the dict names the file and asks for dequantized weights; else it
    is empty. Raise `EngineError` for a directory with several GGUF files and no `config.json`.
    """
    path = local_model(model)
    if path is None:
        return model, {}
    gguf = _gguf_file(path)
    if gguf is None:
        return str(path), {}
    return str(gguf.parent), {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}


def _gguf_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise EngineError(f"{path} holds {len(files)} GGUF files; name one of them")
    return files[0] if files else None


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The chosen dtype, and the times that led to it.

    `seconds` has for each dtype the time of all the model's matrix products, at each number of rows in `ROWS`.
    """

    dtype: str
    seconds: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        times = [f"{dtype} {_milliseconds(seconds)}" for dtype, seconds in self.seconds.items()]
        rows = " and ".join(str(count) for count in ROWS)
        return f"{self.dtype}, the fastest here; time of all matrix products at {rows} rows: {', '.join(times)}"


def fastest_dtype(model: Any) -> DtypeChoice:
    """Time a model's matrix products in each dtype on this CPU; return the fastest dtype, with all times.

    Only a sample of the layers is timed, and the times are scaled up. The fastest is the one with the smallest sum of
    times over the numbers of rows in `ROWS`.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    sample = list(_first(linears))
    scale = sum(_size(one) for one in linears) / max(sum(_size(one) for one in sample), 1)
    seconds: dict[str, tuple[float, ...]] = {}
    for dtype in ("float32", "bfloat16", *(PACKED if can_int8() else ())) if sample else ():
        with contextlib.suppress(RuntimeError):  # some builds of torch list kernels that they lack
            if dtype == "float32" or not _is_too_slow(dtype, sample):
                products = [_product(dtype, one) for one in sample]
                seconds[dtype] = tuple(scale * _seconds(products, sample, rows) for rows in ROWS)
    return DtypeChoice(min(seconds, key=lambda dtype: sum(seconds[dtype]), default="float32"), seconds)


def _is_too_slow(dtype: str, sample: list[nn.Linear]) -> bool:
    """Time a dtype on the sample's smallest layer; return whether it is over ten times slower than float32.

    A dtype that needs less than a second for the whole sample is never too slow.
    """
    smallest = min(sample, key=_size)
    product = [_product(dtype, smallest)]
    shortest_s = min(_once(product, [smallest], ROWS[0]) for _ in range(3))  # the first run may compile
    if shortest_s * sum(_size(one) for one in sample) < _TOO_SLOW_S * _size(smallest):
        return False
    return shortest_s > _TOO_SLOW * _seconds([_product("float32", smallest)], [smallest], ROWS[0])


def _first(linears: list[nn.Linear]) -> Iterator[nn.Linear]:
    """Yield the first layers, until they have enough weights together to be a sample."""
    num_weights = 0
    for one in linears:
        if num_weights >= _SAMPLE:
            return
        num_weights += _size(one)
        yield one


def _size(linear: nn.Linear) -> int:
    return int(linear.weight.numel())


def _product(dtype: str, linear: nn.Linear) -> Product:
    """Return a function that computes a layer's matrix product in a dtype, from rows [rows, inputs]."""
    if dtype in PACKED:
        packed: Product = PACKED[dtype](linear)
        return packed
    weight = linear.weight.detach().to(PLAIN[dtype])
    return lambda rows: plain_linear(rows.to(weight.dtype), weight)


def _seconds(products: list[Product], linears: list[nn.Linear], rows: int) -> float:
    """Time several passes over all layers with `rows` rows of input; return the shortest time in seconds.

    Noise only makes passes longer.
    """
    passes: list[float] = []
    end_s = time.perf_counter() + _SPAN_S
    while len(passes) < 1 + _MIN_RUNS or time.perf_counter() < end_s:
        passes.append(_once(products, linears, rows))
    return min(passes[1:])


def _once(products: list[Product], linears: list[nn.Linear], rows: int) -> float:
    """Time one pass over all layers with `rows` rows of input, and return the seconds."""
    inputs = [torch.ones(rows, one.in_features) for one in linears]
    with torch.inference_mode():
        start_s = time.perf_counter()
        for product, given in zip(products, inputs, strict=True):
            product(given)
        return time.perf_counter() - start_s


def _milliseconds(seconds: tuple[float, ...]) -> str:
    return "/".join(f"{1000 * one:.0f}" for one in seconds) + " ms"
