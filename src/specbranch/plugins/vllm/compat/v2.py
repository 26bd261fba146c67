"""vLLM's Model Runner V2: how our speculator gets into it, and what it reads there.

V2 refuses `custom_class`, the method that brings our proposer into V1. Of the methods that V2 takes, `ngram_gpu` needs
no draft model and goes with asynchronous scheduling. So a configuration that names our proposer and asks for V2 is
given this method where vLLM would then choose V2, and V2's runner is given our speculator in place of the one for
n-grams. Everywhere else, and by default, the configuration stays as it is, and vLLM runs V1.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from specbranch.core.distribution import Sampling
from specbranch.plugins.vllm.arguments import METHOD, PROPOSER
from specbranch.plugins.vllm.compat import config
from specbranch.plugins.vllm.layout import LayoutError
from specbranch.plugins.vllm.settings import RunnerError, read_settings

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, whose level and form it so has

_CARRIER = "ngram_gpu"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_LEAST_TEMPERATURE = 1e-5  # below it vLLM is greedy
_MOST_TEMPERATURE = 100.0


def install() -> None:
    """Let V2 use our speculator, if this vLLM can; to be called before vLLM's configuration is made."""
    if "vllm.config" not in sys.modules:  # not called by vLLM
        return
    if importlib.util.find_spec(f"{_SPECULATORS}.ngram") is None:  # before 0.32
        return
    import vllm.v1.worker.gpu.spec_decode as spec_decode
    from vllm.config.vllm import VllmConfig

    if not hasattr(VllmConfig.__post_init__, "carries"):
        VllmConfig.__post_init__ = _carrying(VllmConfig.__post_init__)
        ours = _with_ours(spec_decode.init_speculator)
        spec_decode.init_speculator = ours
        if _RUNNER in sys.modules:  # then it has the function under its own name
            sys.modules[_RUNNER].init_speculator = ours  # type: ignore[attr-defined]


def _carrying(original: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def post_init(vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        choose_runner(vllm_config)
        original(vllm_config, *args, **kwargs)

    post_init.carries = True  # type: ignore[attr-defined]
    return post_init


def choose_runner(vllm_config: Any) -> None:
    """Give a configuration that names our proposer the form that suits the runner; other ones are left alone."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD or speculative.model != PROPOSER:
        return
    settings = read_settings(config.own_config(vllm_config))
    cause = None
    if settings.runner == "v1":
        cause = "`runner` is 'v1'"
    elif settings.trained_predictor is not None:
        cause = "a trained predictor reads the states of V1"
    else:
        speculative.method = _CARRIER
        if not vllm_config.use_v2_model_runner:
            speculative.method = METHOD
            cause = "vLLM's choice for this configuration"
    if cause is None:
        _say("specbranch drafts for vLLM's Model Runner V2, on GPUs untested; leave out `runner` for V1")
    elif settings.runner == "v2":
        raise RunnerError(f"`runner` is 'v2', but Model Runner V2 cannot be used here ({cause}); set it to 'auto'")
    else:
        _say(f"specbranch drafts for vLLM's Model Runner V1: {cause}")


@functools.cache
def _say(words: str) -> None:
    """Log this once: vLLM makes copies of its configuration."""
    log.info(words)


def refuse_v1(vllm_config: Any) -> None:
    """Raise if V1 has made our proposer though V2 was asked for: this vLLM is too old, or did not load our plugin."""
    if vllm_config.speculative_config.method == METHOD:
        raise RunnerError(
            "`runner` is 'v2', but this vLLM runs our proposer on Model Runner V1. It takes vLLM 0.32, and the plugin "
            "'specbranch' must not be left out by VLLM_PLUGINS; or set `runner` to 'auto'"
        )


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative.method != _CARRIER or speculative.model != PROPOSER:
            return original(vllm_config, device, req_states)
        return _speculator()(vllm_config, device, req_states)

    return init_speculator


def _speculator() -> Any:
    """Our speculator as one of vLLM's."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from specbranch.plugins.vllm.v2.speculator import Speculator

    return type("SpecBranchSpeculator", (Speculator, BaseSpeculator), {})


def refuse_context_parallelism(vllm_config: Any) -> None:
    """Raise if groups of ranks would ask for drafts separately: what they embed would differ."""
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size > 1:
        raise LayoutError(
            f"prefill context parallelism ({size} ranks) cannot be combined with drafts: each rank would ask for its "
            "own. Use tensor parallelism (--tensor-parallel-size), or serve without a draft"
        )


def has_adaptive_verification(vllm_config: Any) -> bool:
    """Whether vLLM shall choose how many places of each row it verifies, by our confidence in them."""
    return bool(vllm_config.speculative_config.enable_adaptive_verification)


def in_the_form_of_v1(runner: Any, names: Sequence[str], slots: Any) -> Any:
    """A batch of V2's runner with those names that V1's runner has for it."""
    cache = runner.encoder_cache
    features = cache.mm_features if cache is not None else {}
    states = runner.sampler.sampling_states
    requests = {
        name: SimpleNamespace(
            mm_features=features.get(name),
            sampling_params=SimpleNamespace(
                temperature=float(states.temperature.np[slot]),
                seed=int(states.seeds.np[slot]) if states.seeds_set[slot] else None,
            ),
        )
        for name, slot in zip(names, slots.tolist(), strict=True)
    }
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(names), request_lora_mapping=runner.lora_state.lora_ids[slots]),
        requests=requests,
    )


def is_any_sampled(runner: Any, input_batch: Any) -> bool:
    """Whether a row of a batch is not greedy."""
    try:
        return bool((runner.sampler.sampling_states.temperature.np[input_batch.idx_mapping_np] > 0).any())
    except AttributeError as error:
        _warn_of_sampler(repr(error))
        return False


def samplings(runner: Any, input_batch: Any, vocab_len: int) -> dict[int, Sampling]:
    """How the rows of a batch sample, as far as their draft tokens may be drawn by chance; on all ranks the same.

    A grammar or a thinking budget cuts a draft by its tokens, and what is tested must not depend on them. Of grammars
    only the batch tells. Nothing where the runner's logits are not as wide as the vocabulary.
    """
    try:
        if input_batch.has_structured_output_reqs or _logits_len(runner, vocab_len) != vocab_len:
            return {}
        states = runner.sampler.sampling_states
        has_budget = getattr(runner.sampler.thinking_budget_state, "use_thinking_budget", None)  # None: nobody can
        found = {}
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            temperature = float(states.temperature.np[slot])
            if _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE and (has_budget is None or not has_budget[slot]):
                top_k = int(states.top_k.np[slot])
                top_p = float(states.top_p.np[slot])
                found[row] = Sampling(temperature, top_p, top_k if top_k < states.vocab_size else 0)
    except AttributeError as error:
        _warn_of_sampler(repr(error))
        return {}
    return found


def _logits_len(runner: Any, vocab_len: int) -> int:
    """How many tokens the logits of a runner's model have; `vocab_len` if it does not tell."""
    processor = getattr(getattr(runner, "model", None), "logits_processor", None)
    return int(getattr(processor, "org_vocab_size", vocab_len))


@functools.cache
def _warn_of_sampler(cause: str) -> None:
    log.warning("this vLLM's sampler is not as expected (%s); draft tokens are proposed as certain", cause)
