"""A draft engine on llama.cpp: handles are sequences of one unified cache, and all rows of a step are one batch.

A fork is `llama_memory_seq_cp`, which marks cells and copies none. Models whose state cannot be truncated (recurrent,
hybrid) are refused. Needs the `llamacpp` extra.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution, top_k_of
from specbranch.engines.base import EngineInfo, EngineOptions, Row
from specbranch.engines.kv_cache import CacheSize, SlotAllocator, cache_size
from specbranch.engines.models import local_model
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.errors import EngineError, EngineFull
from specbranch.extensions import optional_import
from specbranch.machine import free_host_memory

with optional_import("llamacpp"):
    import llama_cpp

log = logging.getLogger(__name__)

# Tokens of idle sessions that may stay in the cache on a CPU. Each row attends over all cells in use, those of other
# sessions too: a thousand of them add about 6 ms to a row of Qwen 0.5B on one core, which takes 70 ms.
_REST_TOKENS = 512
_BATCH = 512  # tokens in one call of llama.cpp; a longer step takes several calls
# Tokens computed at a time on a CPU. Without flash attention llama.cpp reserves attention scores for this many tokens
# times the whole cache; for 512 they need more memory than the cache. The service prefills 32 tokens at a time there.
_CPU_BATCH = 128
# Default limit of the cache, in tokens. A fork and its end scan all cells, which takes 0.5 ms for this many.
_MAX_TOKENS = 1 << 17
_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    # llama.cpp keeps the address of this callback, so it must live as long as the process.
    pass


@dataclass(slots=True)
class _Fed:
    """One token that llama.cpp appends to the cache."""

    token: int
    position: int
    handle: int
    is_output: bool  # whether its distribution is needed


class LlamaCppEngine:
    """A draft engine that runs a GGUF model in llama.cpp."""

    def __init__(self, options: EngineOptions) -> None:
        llama_cpp.llama_log_set(_keep_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = model_params(options.device)
        if local_model(options.model) is None:
            options.on_progress(f"fetching {options.model} from the Hugging Face hub, or its cache")
        path = gguf_path(options.model)
        options.on_progress("loading weights")
        self._model = _load_model(path, params)
        try:
            _require_attention_only(self._model, path, "use a model with attention only as draft")
        except EngineError:
            llama_cpp.llama_model_free(self._model)
            raise
        self._options = options
        max_handles = min(options.max_handles, llama_cpp.llama_max_parallel_sequences())
        size = self._cache_size(params.main_gpu)
        log.info("the draft's KV cache: %s", size)
        self._cells = SlotAllocator(size.tokens, max_handles)
        self._top_k = options.top_k
        self._context = self._make_context(size, max_handles)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self.info = EngineInfo(
            model=path.name,
            device=options.device,
            vocab_len=llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)),
            row_limit=options.row_limit,
            max_handles=max_handles,
            max_tokens=size.tokens,
            idle_cache_tokens=_REST_TOKENS if options.device == "cpu" else size.tokens,
            weight_bytes=int(llama_cpp.llama_model_size(self._model)),
            vocab_fingerprint=read_fingerprint(str(path)),
        )

    @property
    def num_tokens(self) -> int:
        return self._cells.num_used

    def open(self) -> int:
        return self._cells.open()

    def fork(self, handle: int, length: int) -> int:
        fork = self._cells.fork(handle, length)
        llama_cpp.llama_memory_seq_cp(self._memory, handle, fork, 0, length)
        return fork

    def truncate(self, handle: int, length: int) -> None:
        self._cells.truncate(handle, length)
        self._forget(handle, length)

    def close(self, handle: int) -> None:
        self._cells.close(handle)
        self._forget(handle, 0)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        lengths = [len(self._cells.path(row.handle)) for row in rows]
        self._cells.allocate(rows)
        distributions: list[Distribution] = []
        fed = list(_fed(rows, lengths))
        for start in range(0, len(fed), _BATCH):
            chunk = fed[start : start + _BATCH]
            if not self._decode(chunk):
                self._undo(rows, lengths)
                raise EngineFull("llama.cpp has no room in its cache for this step; close handles or truncate them")
            for index, item in enumerate(chunk):
                if item.is_output:
                    distributions.append(self._distribution(index))
        return distributions

    def shutdown(self) -> None:
        if self._context is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
            llama_cpp.llama_model_free(self._model)
            self._context = None

    def _decode(self, chunk: list[_Fed]) -> bool:
        batch = self._batch
        batch.n_tokens = len(chunk)
        for index, item in enumerate(chunk):
            batch.token[index] = item.token
            batch.pos[index] = item.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = item.handle
            batch.logits[index] = item.is_output
        code = llama_cpp.llama_decode(self._context, batch)
        if code < 0 or code > 1:
            cause = "invalid input, such as a token outside the vocabulary" if code == -1 else "see llama.h"
            raise EngineError(f"llama.cpp could not compute a step: llama_decode returned {code} ({cause})")
        return bool(code == 0)

    def _distribution(self, index: int) -> Distribution:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return top_k_of(np.ctypeslib.as_array(pointer, shape=(self.info.vocab_len,)), self._top_k)

    def _undo(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.truncate(row.handle, length)

    def _forget(self, handle: int, length: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, handle, length, -1):
            raise EngineError("llama.cpp cannot truncate this model's state; use a model with attention only as draft")

    def _cache_size(self, gpu: int) -> CacheSize:
        is_cpu = self._options.device == "cpu"
        free_bytes = free_host_memory() if is_cpu else _gpus().free_bytes(gpu)
        num_bytes = self._bytes_per_token(is_cpu)
        return cache_size(self._options.max_tokens, num_bytes, free_bytes, is_cpu=is_cpu, most=_MAX_TOKENS)

    def _bytes_per_token(self, is_cpu: bool) -> int:
        """Return the bytes that a token in the cache needs: keys and values and, on a CPU, its attention scores."""
        model, num_heads = self._model, llama_cpp.llama_model_n_head(self._model)
        head_dim = llama_cpp.llama_model_n_embd(model) // num_heads
        key_len, value_len = (_meta_number(model, f"attention.{name}_length") or head_dim for name in ("key", "value"))
        element_bytes = 4 if self._options.dtype == "float32" else 2
        num_stored = llama_cpp.llama_model_n_layer(model) * llama_cpp.llama_model_n_head_kv(model)
        kept = num_stored * (key_len + value_len) * element_bytes
        return int(kept + (4 * _CPU_BATCH * num_heads if is_cpu else 0))

    def _make_context(self, size: CacheSize, max_handles: int) -> Any:
        options = self._options
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = -(-size.tokens // 256) * 256
        params.n_batch = _BATCH
        params.n_ubatch = _CPU_BATCH if options.device == "cpu" else _BATCH
        params.n_seq_max = max_handles
        params.kv_unified = True
        params.swa_full = True  # otherwise the cache drops tokens that a truncation needs
        params.n_threads = params.n_threads_batch = options.threads or len(os.sched_getaffinity(0))
        params.offload_kqv = options.device != "cpu"
        if options.device == "cpu":
            # On a CPU, flash attention sums in half precision: the same sequence in other cells gave probabilities
            # up to 0.17 apart (SmolLM2, Q4_1). Plain attention differs by rounding only.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        if options.dtype == "float32":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            llama_cpp.llama_model_free(self._model)
            raise EngineError(f"no memory for a cache of {size.tokens} tokens; give fewer by --cache-tokens")
        return context


def supports_gpu() -> bool:
    """Return whether this build of llama.cpp can use a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())


def gguf_path(model: str) -> Path:
    """Find a model's GGUF file, download it if needed, and return its path.

    `model` is a path, a name below $SPECBRANCH_MODELS, or `repo:file.gguf` for a file on the Hugging Face hub.
    """
    path = local_model(model)
    if path is None and ":" in model:
        return _from_hub(*model.split(":", 1))
    if path is not None and path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        raise EngineError(f"{path} holds {len(files)} GGUF files; name one of them")
    if path is None:
        raise EngineError(
            f"no model {model!r} on this machine; give a path, a name below $SPECBRANCH_MODELS, or repo:file.gguf for "
            "the Hugging Face hub"
        )
    return path


def _from_hub(repo: str, name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise EngineError(f"to download {repo}, run: pip install huggingface_hub") from error
    try:
        return Path(hf_hub_download(repo, name))
    except Exception as error:  # the hub's client raises many types
        raise EngineError(f"cannot download {name} of {repo} from the Hugging Face hub: {error}") from error


def model_params(device: str) -> Any:
    """Return the parameters that load a whole model on a device. Raise `EngineError` if llama.cpp cannot use it."""
    params = llama_cpp.llama_model_default_params()
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "gpu", "cuda", "metal", "vulkan") or not (index or "0").isdecimal():
        raise EngineError(f"no device is called {device!r}; give cpu, or gpu:N for a GPU that llama.cpp was built for")
    if kind == "cpu":
        params.n_gpu_layers = 0
        return params
    _require_gpu(device, int(index or 0))
    params.n_gpu_layers = -1
    # By default, llama.cpp spreads a model over all GPUs, those of the target too.
    params.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
    params.main_gpu = int(index or 0)
    return params


def _require_attention_only(model: Any, path: Path, advice: str) -> None:
    if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
        raise EngineError(
            f"{path.name} is a recurrent or hybrid model, whose state cannot be truncated to an earlier token; {advice}"
        )


def _gpus() -> GgmlGpus:
    return GgmlGpus(llama_cpp.llama_cpp._lib)


def _require_gpu(device: str, index: int) -> None:
    if not supports_gpu():
        raise EngineError(
            f"the draft cannot run on {device}: this llama.cpp was built without GPUs. Build it for CUDA with "
            "CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python, "
            "use a Transformers model with the torch engine, or give cpu as the device"
        )
    num_gpus = _gpus().count
    if num_gpus and index >= num_gpus:
        raise EngineError(f"there is no {device}: llama.cpp sees {num_gpus} GPUs, counted from 0")


def _load_model(path: Path, params: Any) -> Any:
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise EngineError(
            f"{path} could not be loaded; check that it is a complete GGUF file and update llama-cpp-python"
        )
    return model


def _meta_number(model: Any, name: str) -> int | None:
    """Return the number in a model's GGUF metadata whose key is the model's architecture, a dot and `name`.

    Returns None if the key is missing or its value is not a whole number.
    """
    found: list[str] = []
    for key in ("general.architecture", name):
        buffer = ctypes.create_string_buffer(128)
        full = f"{found[0]}.{key}" if found else key
        if llama_cpp.llama_model_meta_val_str(model, full.encode(), buffer, len(buffer)) < 0:
            return None
        found.append(buffer.value.decode())
    return int(found[1]) if found[1].isdecimal() else None


def _fed(rows: Sequence[Row], lengths: Sequence[int]) -> Iterator[_Fed]:
    for row, length in zip(rows, lengths, strict=True):
        first = len(row.tokens) - row.num_outputs
        for offset, token in enumerate(row.tokens):
            yield _Fed(token, length + offset, row.handle, offset >= first)


class GgmlGpus:
    """The GPUs that ggml lists for this process, in llama.cpp's order; none if the library cannot list them.

    `library` is llama.cpp as loaded by ctypes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            self._devices = self._find()
        except AttributeError:
            self._devices = []

    @property
    def count(self) -> int:
        """How many GPUs ggml lists for this process; 0 if the library lacks the functions to list them."""
        return len(self._devices)

    def free_bytes(self, index: int) -> int | None:
        """Return the free bytes of GPU number `index`; None if they are unknown."""
        if index >= len(self._devices):
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.ggml_backend_dev_memory(
            ctypes.c_void_p(self._devices[index]), ctypes.byref(free), ctypes.byref(total)
        )
        return free.value

    def _find(self) -> list[int]:
        count, get, kind = (getattr(self._library, f"ggml_backend_dev_{name}") for name in ("count", "get", "type"))
        count.restype, get.restype = ctypes.c_size_t, ctypes.c_void_p
        devices = [get(ctypes.c_size_t(number)) for number in range(count())]
        return [device for device in devices if kind(ctypes.c_void_p(device)) == _GPU]
