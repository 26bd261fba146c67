"""Any causal model of Transformers as a draft engine, on any device of torch.

A session has one arena of keys and values. A handle is a path of slots through its arena and a new token sees exactly
its own path, so forks share what they have in common and copy nothing. A step is one forward pass: the rows of all
sessions lie end to end in one sequence, and only attention looks at one arena after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.options import DTYPES, EngineOptions, local_model
from specbranch.engines.protocol import EngineError, EngineFull, EngineInfo, Row, require_length, require_rows
from specbranch.engines.top_k import top_k_of

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GgufConfig
except ImportError as missing:
    raise EngineError(
        f"the torch engine needs torch and a recent transformers ({missing}); pip install 'specbranch[torch]'"
    ) from missing

from specbranch.engines.dtype import PLAIN, fastest_dtype
from specbranch.engines.fused import fuse
from specbranch.engines.int8 import PACKED, can_int8, pack_linears, packed_bytes

log = logging.getLogger(__name__)

SlotIds = NDArray[np.int64]

_NAME = "specbranch"  # of our attention, in the registries of Transformers
_FIRST_LEN = 64  # slots of a new arena
_FEW = 16  # new tokens of a session, up to which its heads are looked up together
_NOT_OURS = ("softcap", "s_aux", "position_bias")  # what some models ask of attention and ours does not do


class _Slots:
    """Which slots of an arena are held, and by how many handles."""

    def __init__(self) -> None:
        self._num_holders = np.zeros(_FIRST_LEN, dtype=np.int32)
        self._free: list[int] = []
        self._num_touched = 0

    @property
    def num_used(self) -> int:
        """Slots that some handle holds."""
        return self._num_touched - len(self._free)

    def take(self, count: int) -> SlotIds:
        """New slots with one holder, lowest first: attention runs over all slots up to the highest of a path."""
        reused = [heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = range(self._num_touched, self._num_touched + count - len(reused))
        self._num_touched = fresh.stop
        if fresh.stop > len(self._num_holders):
            self._num_holders = np.pad(self._num_holders, (0, _room(fresh.stop) - len(self._num_holders)))
        slots: SlotIds = np.array([*reused, *fresh], dtype=np.int64)
        self._num_holders[slots] = 1
        return slots

    def hold(self, path: SlotIds) -> None:
        """One more holder for every slot of a path."""
        self._num_holders[path] += 1

    def release(self, path: SlotIds) -> None:
        """One holder fewer; slots without a holder are free."""
        self._num_holders[path] -= 1
        for slot in path[self._num_holders[path] == 0].tolist():
            heappush(self._free, slot)


class _Arena:
    """Keys and values of one session, by layer."""

    def __init__(self) -> None:
        self.slots = _Slots()
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # each [1, kv_heads, capacity, width]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(store.nbytes for stores in self.layers.values() for store in stores)

    def write(self, layer: int, share: _Share, new: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Put one layer's new keys and values into their slots, and give all up to the share's span."""
        empty = (new[0][:, :, :0], new[1][:, :, :0])
        keys, values = (_grown(store, share.span) for store in self.layers.get(layer, empty))
        self.layers[layer] = keys, values
        for store, fresh in zip((keys, values), new, strict=True):
            store.index_copy_(2, share.slots, fresh)
        return [store[:, :, : share.span] for store in (keys, values)]


@dataclass(slots=True)
class _Handle:
    arena: _Arena
    path: SlotIds


@dataclass(slots=True)
class _Share:
    """One arena's part of a step: tokens `start` to `stop` of the sequence go to `slots` and see what `mask` says."""

    arena: _Arena
    start: int
    stop: int
    slots: torch.Tensor  # [tokens]
    span: int
    mask: torch.Tensor | None  # [tokens, span], 0 or -inf; None for a whole sequence in the first slots, in order
    _repeated: torch.Tensor | None = None

    def mask_of(self, num_heads: int) -> torch.Tensor | None:
        """The mask for so many heads, one behind the other; every layer of a step asks for the same."""
        if self._repeated is None and self.mask is not None:
            self._repeated = self.mask.repeat(num_heads, 1)
        return self._repeated


class TorchEngine:
    """A draft engine on a model of Transformers."""

    def __init__(self, options: EngineOptions) -> None:
        if options.threads is not None and options.device == "cpu":
            torch.set_num_threads(options.threads)
        self._options = options
        self._handles: dict[int, _Handle] = {}
        self._model, self._dtype = _load(options)
        _require_plain_attention(self._model, options)
        self._model.set_attn_implementation(_NAME)
        self._vocab_len = self._probe()

    @property
    def info(self) -> EngineInfo:
        o = self._options
        return EngineInfo(
            o.model, o.device, self._vocab_len, o.row_limit, o.max_handles, o.max_tokens, dtype=self._dtype
        )

    @property
    def num_tokens(self) -> int:
        return sum(arena.slots.num_used for arena in self._arenas())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, tied ones counted once: what one step must at least read."""
        plain: int = sum(weight.numel() * weight.element_size() for weight in self._model.parameters())
        return plain + packed_bytes(self._model)

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(arena.num_bytes for arena in self._arenas())

    def open(self) -> int:
        return self._hold(_Handle(_Arena(), np.empty(0, dtype=np.int64)))

    def fork(self, handle: int, length: int) -> int:
        origin = self._handles[handle]
        require_length(handle, len(origin.path), length)
        fork = self._hold(_Handle(origin.arena, origin.path[:length]))
        origin.arena.slots.hold(origin.path[:length])
        return fork

    def truncate(self, handle: int, length: int) -> None:
        held = self._handles[handle]
        require_length(handle, len(held.path), length)
        held.arena.slots.release(held.path[length:])
        held.path = held.path[:length]

    def close(self, handle: int) -> None:
        self.truncate(handle, 0)
        del self._handles[handle]

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self._require_rows(rows)
        if not rows:
            return []
        lengths = [len(self._handles[row.handle].path) for row in rows]
        try:
            logits = self._feed(rows)
        except BaseException as error:
            for row, length in zip(rows, lengths, strict=True):
                self.truncate(row.handle, length)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise EngineFull(f"{self._options.device} has no memory for this step; close handles") from error
            raise
        top_k = min(self._options.top_k, self._vocab_len)
        return [top_k_of(row, top_k) for row in logits]

    def shutdown(self) -> None:
        self._handles.clear()
        del self._model
        if self._options.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _feed(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Take slots for the rows' tokens and run the model; the logits behind each row."""
        by_arena: dict[_Arena, list[Row]] = {}
        for row in rows:
            held = self._handles[row.handle]
            held.path = np.concatenate((held.path, held.arena.slots.take(len(row.tokens))))
            by_arena.setdefault(held.arena, []).append(row)
        shares: list[_Share] = []
        for arena, group in by_arena.items():
            shares.append(self._share(arena, shares[-1].stop if shares else 0, group))
        packed = [row for group in by_arena.values() for row in group]
        logits = self._forward(packed, shares)
        by_handle = {row.handle: behind for row, behind in zip(packed, logits, strict=True)}
        return [by_handle[row.handle] for row in rows]

    def _forward(self, rows: Sequence[Row], shares: list[_Share]) -> NDArray[np.float32]:
        tokens = np.array([token for row in rows for token in row.tokens])
        places = [np.arange(len(self._handles[row.handle].path))[-len(row.tokens) :] for row in rows]
        ends = np.cumsum([len(row.tokens) for row in rows]) - 1
        with torch.inference_mode():
            output = self._model(
                input_ids=self._tensor(tokens)[None],
                position_ids=self._tensor(np.concatenate(places))[None],
                logits_to_keep=self._tensor(ends),
                use_cache=False,
                specbranch_shares=shares,
            )
        logits: NDArray[np.float32] = output.logits[0].float().cpu().numpy()  # [rows, vocab]
        return logits

    def _share(self, arena: _Arena, start: int, rows: Sequence[Row]) -> _Share:
        paths = [self._handles[row.handle].path for row in rows]
        news = [path[-len(row.tokens) :] for row, path in zip(rows, paths, strict=True)]
        slots = np.concatenate(news)
        span = 1 + max(int(path.max()) for path in paths)
        is_plain = np.array_equal(slots, np.arange(span))
        mask = None if is_plain and len(rows) == 1 else self._mask(paths, news, span)
        return _Share(arena, start, start + len(slots), self._tensor(slots), span, mask)

    def _mask(self, paths: Sequence[SlotIds], news: Sequence[SlotIds], span: int) -> torch.Tensor:
        # Added to the scores rather than boolean: every layer would have to turn a boolean mask into this one.
        blocks = [_sight(path, len(new), span) for path, new in zip(paths, news, strict=True)]
        is_seen = self._tensor(np.concatenate(blocks))
        mask = torch.zeros(is_seen.shape, dtype=self._model.dtype, device=is_seen.device)
        return mask.masked_fill_(~is_seen, float("-inf"))

    def _probe(self) -> int:
        """The width of the logits, by two first steps, one without a mask and one with, that show if both work."""
        handle = self.open()
        try:
            for tokens in ((0, 0), (0,)):
                (logits,) = self._feed([Row(handle, tokens)])
        except EngineError:
            raise
        except Exception as error:
            raise _unfit(self._model, f"its first step failed ({_cause(error)})") from error
        num_layers = len(self._handles[handle].arena.layers)
        self.close(handle)
        if num_layers != _text_config(self._model).num_hidden_layers:
            raise _unfit(self._model, f"only {num_layers} of its layers are attention that can be shared")
        return len(logits)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._options.device)

    def _arenas(self) -> set[_Arena]:
        return {held.arena for held in self._handles.values()}

    def _hold(self, held: _Handle) -> int:
        if len(self._handles) >= self._options.max_handles:
            raise EngineFull(f"all {self._options.max_handles} handles are in use")
        handle = next(number for number in range(len(self._handles) + 1) if number not in self._handles)
        self._handles[handle] = held
        return handle

    def _require_rows(self, rows: Sequence[Row]) -> None:
        require_rows(rows)
        for row in rows:
            # On a GPU such a token would not only fail: it would end the process.
            if min(row.tokens) < 0 or max(row.tokens) >= self._vocab_len:
                raise ValueError(f"handle {row.handle}: tokens must be below {self._vocab_len}, the vocabulary's size")
        wanted = sum(len(row.tokens) for row in rows)
        room = self._options.max_tokens - self.num_tokens
        if wanted > room:
            raise EngineFull(f"the cache has room for {room} more tokens, not {wanted}")


def _room(length: int) -> int:
    """The capacity that holds a length: doubled from the first."""
    return max(_FIRST_LEN, 1 << (length - 1).bit_length())


def _grown(store: torch.Tensor, length: int) -> torch.Tensor:
    """A store [1, heads, capacity, width] that holds at least `length` slots."""
    if length <= store.shape[2]:
        return store
    # Zeros, not empty: a masked slot has weight 0, and 0 times a NaN left in memory would still be NaN.
    grown = store.new_zeros((*store.shape[:2], _room(length), store.shape[3]))
    grown[:, :, : store.shape[2]] = store
    return grown


def _sight(path: SlotIds, num_new: int, span: int) -> NDArray[np.bool_]:
    """Which slots the last tokens of a path see [num_new, span]: the path up to and with themselves."""
    is_seen = np.zeros((num_new, span), dtype=np.bool_)
    is_seen[:, path[:-num_new]] = True
    is_seen[:, path[-num_new:]] = np.tri(num_new, dtype=np.bool_)
    return is_seen


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,  # [1, kv_heads, tokens, width]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    specbranch_shares: Sequence[_Share] = (),
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """The attention that Transformers calls in every layer of an engine's model."""
    if not specbranch_shares or attention_mask is not None or any(asked.get(name) is not None for name in _NOT_OURS):
        raise _unfit(module, "its attention is not plain")
    return _attended(module.layer_idx, specbranch_shares, query, key, value, scaling).contiguous(), None


def _attended(
    layer: int,
    shares: Sequence[_Share],
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,  # [1, kv_heads, tokens, width]
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """What the queries found, each in its own arena [1, tokens, heads, width]."""
    parts = []
    for share in shares:
        tokens = slice(share.start, share.stop)
        keys, values = share.arena.write(layer, share, (key[:, :, tokens], value[:, :, tokens]))
        parts.append(_looked_up(share, query[:, :, tokens], keys, values, scaling).transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _looked_up(
    share: _Share, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    num_heads, num_tokens = query.shape[1:3]
    num_sharing = num_heads // keys.shape[1]  # heads that read the same keys
    if share.mask is None or num_sharing == 1 or num_tokens > _FEW:
        mask, is_shared = share.mask, num_sharing > 1
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_shared
        )
    # Queries of those heads as further queries of one head: the keys are read once, not once for each.
    queries = query.reshape(1, keys.shape[1], num_sharing * num_tokens, -1)
    mask = share.mask_of(num_sharing)
    found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    return found.reshape(query.shape)


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that Transformers makes for our attention: the shares hold the true ones."""


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _no_mask)


def _load(options: EngineOptions) -> tuple[Any, str]:
    """The model, ready to be run, and the type of its weights."""
    _require_dtype(options)
    place, how = _source(options.model)
    plain = PLAIN.get(options.dtype, "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=plain, **how)
        model = model.to(options.device).eval()
        dtype = options.dtype
        if dtype == "auto" and options.device == "cpu":
            choice = fastest_dtype(model)
            log.info("draft on the CPU in %s", choice)
            dtype = choice.dtype
        if dtype in PACKED:
            kind = PACKED[dtype]
            return pack_linears(fuse(model.float(), _attended, kind), kind), dtype
        # Weights only: what a model keeps beside them, such as the frequencies of its positions, needs its 32 bits.
        for weight in model.parameters():
            weight.data = weight.data.to(PLAIN.get(dtype, weight.dtype))
        return model, str(model.dtype).removeprefix("torch.")
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"cannot load {options.model!r} on {options.device}: {_cause(error)}; give a directory with config.json "
            "and safetensors, a GGUF file, a name below $SPECBRANCH_MODELS or a name on the Hugging Face hub"
        ) from error


def _require_dtype(options: EngineOptions) -> None:
    if options.dtype not in DTYPES:
        raise EngineError(f"there is no dtype {options.dtype!r}; give {', '.join(DTYPES)}")
    if options.dtype in PACKED and options.device != "cpu":
        raise EngineError(f"{options.dtype} is for the CPU; give auto, {', '.join(PLAIN)}")
    if options.dtype in PACKED and not can_int8():
        raise EngineError("this torch has no products of 8 bits; give auto or bfloat16, or use the llama.cpp engine")


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """What to call `from_pretrained` with."""
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


def _require_plain_attention(model: Any, options: EngineOptions) -> None:
    """Refuse a model that keeps more than keys and values, or whose tokens do not see their whole sequence."""
    if type(model)._is_stateful or not type(model)._supports_attention_backend:
        raise _unfit(model, "it is recurrent, or Transformers gives it no choice of attention")
    config = _text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window >= options.max_tokens:  # no sequence is long enough to leave it
        window = None
        kinds.discard("sliding_attention")
    if window is not None:
        raise _unfit(model, f"its sliding window is {window}, less than max_tokens ({options.max_tokens})")
    if kinds:
        raise _unfit(model, f"it has layers of {', '.join(sorted(kinds))}")


def _cause(error: Exception) -> str:
    """The first line of an error: those of Transformers go on for a page."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _unfit(model: Any, why: str) -> EngineError:
    return EngineError(
        f"{type(model).__name__} cannot be a draft on the torch engine: {why}; choose a model with full attention in "
        "every layer, such as Llama, Qwen2, Qwen3 or SmolLM2"
    )
