"""Models of Transformers that run their own code, with our attention in place of theirs.

Our attention is registered in Transformers under `NAME`. A layer may see only the last tokens of a sequence, bound its
scores, and have attention sinks. What it cannot do is refused when the model is loaded.

Recurrent layers compute by their own code too. They get the rows of a step as batches, and the states of these rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from specbranch.engines.torch.attention import AttentionContext, LayerForm
from specbranch.engines.torch.kv_store import StateStore
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import pad
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NAME = "specbranch"  # of our attention in the registries of Transformers
_UNKNOWN_FEATURES = ("position_bias", "block_mask", "cu_seq_lens_q")  # of some models' attention, which ours lacks
_LAYERS = {"full_attention", "sliding_attention", "attention"}  # the kinds of layers that ours can do
MIXERLESS = {"moe", "mlp"}  # and those in which tokens do not see each other
_CACHES = ("cache_params", "past_key_values")  # what token mixers call the cache that holds their state
_PARTS = ("conv_states", "recurrent_states")  # of a layer of such a cache; each has several tensors, or none
_step: ContextVar[AttentionContext] = ContextVar("specbranch_step")  # not every model hands keywords on to its layers


class UnsupportedModel(EngineError):
    """A model has something that this engine's attention and cache cannot do; another path may run it."""


class PlainModel(nn.Module):
    """An unchanged model of Transformers with the interface of `FusedModel`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.set_attn_implementation(NAME)
        self.model = model
        self.config = text_config(model)
        self.states = _with_states(model)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor | None, step: AttentionContext
    ) -> torch.Tensor:
        """Run the model and write keys and values to the step's KV store; return the logits [outputs, vocabulary].

        `outputs` has the indices of the tokens whose logits are returned; None means all.
        """
        reset = _step.set(step)
        try:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                logits_to_keep=0 if outputs is None else outputs,
                use_cache=False,
            )
        finally:
            _step.reset(reset)
        logits: torch.Tensor = output.logits[0]
        return logits

    def get_input_embeddings(self) -> Any:
        """Return the input embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the output layer."""
        return self.model.get_output_embeddings()


def _attend_layer(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Call `AttentionContext.attend` for a layer of Transformers; return its result, and None as attention weights."""
    step, name = _step.get(None), type(module).__name__
    if step is None or attention_mask is not None or any(features.get(one) is not None for one in _UNKNOWN_FEATURES):
        raise unsupported(name, "its attention is not plain")
    if module.layer_idx in step.done:
        raise unsupported(name, f"layer {module.layer_idx} calls its attention twice, and one cache cannot hold both")
    step.done.add(module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    value_len = value.shape[-1]
    if value_len != key.shape[-1]:  # MLA: zeros make values and keys equally long, and change nothing
        width = max(value_len, key.shape[-1])
        query, key, value = (pad(part, (0, width - part.shape[-1])) for part in (query, key, value))
    fresh = torch.cat((key, value), dim=1)[0].transpose(0, 1)
    form = LayerForm(features.get("sliding_window"), features.get("softcap"), features.get("s_aux"))
    found = step.attend(module.layer_idx, query[0].transpose(0, 1), fresh, scale, form)
    return found[..., :value_len].flatten(1, 2)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask to Transformers: the attention of the step knows which tokens each token sees."""


AttentionInterface.register(NAME, _attend_layer)
AttentionMaskInterface.register(NAME, _no_mask)


def text_part(model: Any) -> Any:
    """Return the language model in a model that also reads images or sounds; any other model as it is."""
    language, head = getattr(model.base_model, "language_model", None), model.get_output_embeddings()
    if language is None or head is None:
        return model
    if type(language.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return _LanguageModel(language, head)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(language.config)]
    with torch.device("meta"):  # without weights: those of the given model take their place
        whole = kind(language.config)
    setattr(whole, whole.base_model_prefix, language)
    whole.set_output_embeddings(head)
    return whole


class _LanguageModel(nn.Module):
    """The text decoder of a larger model with its output layer, for families without a class of their own for it."""

    def __init__(self, base: Any, head: Any) -> None:
        super().__init__()
        self.base_model, self.lm_head, self.config = base, head, base.config
        self._supports_attention_backend, self._is_stateful = base._supports_attention_backend, base._is_stateful

    def forward(self, logits_to_keep: Any = 0, **given: Any) -> Any:
        """Return the base model's output, with logits."""
        out = self.base_model(**given)
        part = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        out["logits"] = self.lm_head(out.last_hidden_state[:, part])
        out.logits = out["logits"]
        return out

    @property
    def device(self) -> Any:
        return self.base_model.device

    @property
    def dtype(self) -> Any:
        return self.base_model.dtype

    def set_attn_implementation(self, name: str) -> None:
        self.base_model.set_attn_implementation(name)

    def get_input_embeddings(self) -> Any:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def require_known_attention(model: Any) -> None:
    """Raise `EngineError` if a model has other state than keys and values, or a kind of attention that ours lacks."""
    name, kinds, recurrent = type(model).__name__, layer_kinds(text_config(model)), recurrent_layers(model)
    if not model._supports_attention_backend and not recurrent:  # those are replaceable, and do not always say so
        raise unsupported(name, "Transformers does not let its attention be replaced")
    unknown = {kind for layer, kind in kinds.items() if layer not in recurrent} - _LAYERS - MIXERLESS
    if unknown:
        raise unsupported(name, f"it has layers of {', '.join(sorted(unknown))}")
    if model._is_stateful and not kinds:  # a family with recurrent layers may have models without any
        raise unsupported(name, "it is recurrent")


def _with_states(model: Any) -> StateStore | None:
    """Replace the forward functions of a model's recurrent layers; return the store of their states, None without."""
    found = recurrent_layers(model)
    if not found:
        return None
    states, cache = StateStore(str(model.device)), _new_cache(model)
    for index, module in found.items():
        _RecurrentLayer(states, cache, index, module)
    return states


class _RecurrentLayer:
    """A recurrent layer's forward function, for the rows of a step.

    The layer's own code computes: it gets rows as a batch, and a cache of Transformers with the states of these.
    """

    def __init__(self, states: StateStore, cache: Any, index: int, module: Any) -> None:
        self._index = index
        self._states = states
        self._cache = cache  # shared by all layers: each puts its own states in before it runs
        self._blank = cache.layers[index]
        self._continued: Any = None  # a layer with states, but without their tensors
        self._argument = _cache_argument(module)
        self._forward = module.forward
        module.forward = self

    def __call__(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return the layer's output for the tokens of a step [1, tokens, hidden size]."""
        out = torch.empty_like(hidden_states)
        for group in self._states.groups:
            layer = self._cache.layers[self._index] = self._layer(group.sources)
            given[self._argument] = self._cache
            is_split = self._states.one_by_one and group.sources is not None
            for tokens in group.tokens.split(1 if is_split else group.tokens.shape[1], dim=1):
                out[0, tokens] = self._forward(hidden_states[0, tokens], **given)
            self._keep(layer, group.targets)
        self._cache.layers[self._index] = self._blank
        return out

    def _layer(self, sources: torch.Tensor | None) -> Any:
        """Return the layer of a cache with copies of the states in `sources`; with None, for new sequences."""
        if sources is None:
            return copy.deepcopy(self._blank)
        layer = _without_tensors(self._continued)
        for (_, part, number), found in self._states.read(self._index, sources):
            getattr(layer, part)[number] = found
        return layer

    def _keep(self, layer: Any, targets: torch.Tensor) -> None:
        for part in _PARTS:
            for number, found in getattr(layer, part).items():
                if found is not None:
                    self._states.write((self._index, part, number), targets, found)
        self._continued = self._continued or _without_tensors(layer)


def recurrent_layers(model: Any) -> Mapping[int, Any]:
    """Return the modules in a model that keep the state of a recurrent layer in a cache, by the index of the layer.

    All that Transformers has begin with a convolution. Its older versions have other caches, and none is found.
    """
    found = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())
        if _cache_argument(module)
    }
    layers = _new_cache(model).layers if found else []
    is_known = all(isinstance(getattr(layers[index], part, None), dict) for index in found for part in _PARTS)
    return found if is_known else {}


def _new_cache(model: Any) -> Any:
    return DynamicCache(config=text_config(model))


def _without_tensors(layer: Any) -> Any:
    """Return a copy of a cache's layer that has its flags, but no state."""
    layer = copy.copy(layer)
    for part in _PARTS:
        setattr(layer, part, dict.fromkeys(getattr(layer, part)))
    return layer


def _cache_argument(module: Any) -> str:
    """Return what a module calls its cache; empty if it takes none."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in known), "")


def fix_rotary(model: Any, max_tokens: int | None) -> None:
    """Choose one set of rotary frequencies for all sequences, where Transformers chooses by the longest of a step.

    A step has the tokens of many sequences, and stored keys keep the frequencies with which they were written. With
    `longrope` the long frequencies are chosen, as vLLM does, unless a cache of `max_tokens` holds no sequence longer
    than the original length. `dynamic` has frequencies for every length, and is refused.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if any("dynamic" in str(one) for one in kinds):
            raise EngineError(
                f"{type(model).__name__} cannot be a draft on the torch engine: its rotary frequencies change with the "
                "length of a sequence (dynamic); choose a model with another kind"
            )
        if "longrope" not in kinds:
            continue
        if kinds != {"longrope"} or isinstance(kind, dict):
            raise unsupported(type(model).__name__, "its layers mix kinds of rotary frequencies, longrope among them")
        original = module.config.rope_parameters["original_max_position_embeddings"]
        if max_tokens is None or max_tokens > original:
            found, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=original + 1)
            module.register_buffer("inv_freq", found, persistent=False)
        module.rope_type = "default"  # Transformers leaves its frequencies alone


def sliding_window(config: Any) -> int | None:
    """Return the sliding window in a model's config: how many tokens each token sees at most; None if it sees all."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None


def layer_kinds(config: Any) -> dict[int, str]:
    """Return the kind of each layer, by its index; empty if a model's config does not say."""
    return dict(enumerate(getattr(config, "layer_types", None) or ()))


def text_config(model: Any) -> Any:
    """Return the part of a model's config that describes its language model."""
    return model.config.get_text_config(decoder=True)


def unsupported(name: str, why: str) -> UnsupportedModel:
    """Return the error for a class of models, called `name`, that cannot be run; `why` is the reason."""
    return UnsupportedModel(f"{name}: {why}")
