"""H-RAD, the trained predictor of acceptance, on the running target: hooks that record hidden states, and the network.

The network reads the hidden states of the last layers and predicts how much of the next draft the target will accept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.round import AcceptanceHint
from specbranch.errors import SpecBranchError
from specbranch.hrad.network import Hrad, read_hrad
from specbranch.plugins.vllm.compat import BatchRow, vocab_len

log = logging.getLogger(__name__)
_Array = np.ndarray[Any, np.dtype[np.float32]]


class FeatureError(SpecBranchError, ValueError):
    """The target cannot provide the features that a trained predictor needs."""


def check_features(vllm_config: Any, num_layers: int, hidden_len: int) -> None:
    """Raise `FeatureError` if vLLM cannot provide the last `num_layers` hidden states, each of size `hidden_len`.

    It reads the configuration only, so that it can be called before a model is loaded.
    """
    model = vllm_config.model_config
    if model.get_hidden_size() != hidden_len:
        raise FeatureError(
            f"the predictor was trained for hidden states of size {hidden_len}, {model.model} has "
            f"{model.get_hidden_size()}; train one for this target"
        )
    if not 1 <= num_layers <= model.get_total_num_hidden_layers():
        raise FeatureError(
            f"the predictor needs {num_layers} layers, the target has fewer; train a predictor for this target"
        )
    if num_layers == 1:
        return
    advice = "or train the predictor with --layers 1"
    if not model.enforce_eager:
        raise FeatureError(
            f"the predictor needs {num_layers} layers, and a compiled model gives access to its last one only: "
            f"start vLLM with enforce_eager (--enforce-eager), {advice}"
        )
    if vllm_config.parallel_config.use_ubatching:
        raise FeatureError(f"vLLM splits its steps into micro-batches: start it without --enable-dbo, {advice}")


def embedder(vllm_config: Any, model: Any, is_kept: bool) -> Callable[[Sequence[int]], Any]:
    """Return a function that maps n tokens to the target's input embeddings [n, hidden_len].

    With tensor parallelism the embedding table is sharded, and a lookup needs all ranks. So all ranks must call this at
    the same time, and read the whole table once; only the rank with `is_kept` keeps the table, in host memory, and can
    use the returned function. Raise `FeatureError` if the embeddings cannot be read.
    """
    import torch

    embed = getattr(model, "embed_input_ids", None)
    if embed is None:
        raise FeatureError(f"{type(model).__name__} gives no access to its input embeddings; use another `predictor`")
    device = next(model.parameters()).device

    def look_up(tokens: Sequence[int]) -> Any:
        return embed(torch.tensor(tokens, device=device))

    with torch.inference_mode():
        if look_up([0]).shape != (1, vllm_config.model_config.get_hidden_size()):
            # With pipeline stages the table may be on another rank than the last layers.
            raise FeatureError("the target's input embeddings are not on the last pipeline stage: use fewer stages")
        if vllm_config.parallel_config.tensor_parallel_size == 1:
            return look_up
        table = _table(look_up, vocab_len(vllm_config), is_kept)
    return lambda tokens: table[torch.tensor(tokens)]


def _table(look_up: Callable[[Sequence[int]], Any], vocab_len: int, is_kept: bool) -> Any:
    """Look up all tokens' embeddings; return them in host memory [vocab_len, hidden_len] if `is_kept`, else None."""
    import torch

    parts = []
    for start in range(0, vocab_len, 8192):
        part = look_up(range(start, min(start + 8192, vocab_len)))
        if is_kept:
            parts.append(part.cpu())
    return torch.cat(parts) if parts else None


@dataclass(slots=True, kw_only=True)
class _Step:
    """The recording of one engine step: the hidden states at every sampled position, row after row."""

    runner: Any
    scheduler_output: Any
    taken: list[Any]  # of each hooked layer: [sampled, hidden_len]
    last: Any = None  # after the final norm: [sampled, hidden_len]
    num_drafts: list[int] = field(default_factory=list)  # of each row
    positions: Any = None  # at which the step samples, among all of its tokens
    fault: Exception | None = None


class FeatureHook:
    """Copies H-RAD's features from a running target, at the positions that a step samples. It changes no tensor.

    A layer passes (hidden, residual) to the next, which may write to both; their sum is what Transformers calls
    `hidden_states`. So a hook after each layer copies the sum at these positions at once. The state after the final
    norm needs no hook: the runner keeps it for sampling. Each tensor parallel rank has the full vectors, because
    attention and MLP end in a `RowParallelLinear` that sums over the ranks.

    No method that vLLM calls in a step raises; only `read` does, which our own code calls.
    """

    def __init__(self, model: Any, num_layers: int, embed: Callable[[Sequence[int]], Any]) -> None:
        self._embed = embed
        self._step: _Step | None = None
        self._num_hooked = num_layers - 1
        layers = _last_layers(model, num_layers) if self._num_hooked else []
        self._hooks = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]

    def close(self) -> None:
        """Remove the hooks from the target."""
        for hook in self._hooks:
            hook.remove()
        self._step = None

    def begin(self, runner: Any, scheduler_output: Any) -> None:
        """Begin to record the step that the runner is about to run."""
        self._step = _Step(runner=runner, scheduler_output=scheduler_output, taken=[None] * self._num_hooked)

    def end(self, runner: Any) -> None:
        """Record the last hidden states and each row's number of draft tokens, after the forward pass."""
        step = self._step
        if step is None:
            return
        try:
            state = runner.execute_model_state
            if state is None:  # nothing was scheduled
                self._step = None
                return
            step.last = state.sample_hidden_states
            metadata = state.spec_decode_metadata  # None in a step without drafts, before vLLM 0.32
            step.num_drafts = list(metadata.num_draft_tokens) if metadata else [0] * len(runner.input_batch.req_ids)
        except Exception as error:
            step.fault = error

    def read(self, sampled: Sequence[Sequence[int]], rows: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the features recorded in the last step for the rows with the indices `rows`, [len(rows), d_in].

        `sampled` has the tokens that the step sampled for each row of the batch. A step can be read only once. Raise if
        the step was not recorded, or not completely.
        """
        import torch

        step, self._step = self._step, None
        if step is None:
            raise FeatureError("no forward pass was recorded for this step")
        if step.fault is not None:
            raise step.fault
        if len(sampled) != len(step.num_drafts) or any(part is None for part in step.taken):
            raise FeatureError("the recorded forward pass is not the one that was sampled from")
        firsts = np.cumsum([0, *step.num_drafts]) + np.arange(len(step.num_drafts) + 1)
        if firsts[-1] != len(step.last) or any(firsts[-1] != len(part) for part in step.taken):
            raise FeatureError("the number of recorded positions is not that of the sampled tokens")
        # The newest token was predicted at the position of the last accepted one.
        picks = torch.tensor([int(firsts[row]) + len(sampled[row]) - 1 for row in rows])
        with torch.inference_mode():
            states = [part[picks.to(part.device)].float() for part in (*step.taken, step.last)]
            newest = self._embed([sampled[row][-1] for row in rows]).to(states[0].device).float()
            features: np.ndarray[Any, np.dtype[np.float32]] = torch.cat([*states, newest], dim=1).cpu().numpy()
        return features

    def _hook(self, index: int) -> Callable[[Any, Any, Any], None]:
        def take(layer: Any, inputs: Any, output: Any) -> None:
            step = self._step
            if step is None:  # vLLM profiles its memory or warms up
                return
            try:
                if step.positions is None:
                    step.positions = _sampled_positions(step.runner, step.scheduler_output)
                step.taken[index] = _rows(output, step.positions)
            except Exception as error:
                step.fault = error

        return take


def _last_layers(model: Any, num_layers: int) -> list[Any]:
    """Return the decoder layers whose outputs are Transformers' `hidden_states[-K:-1]`, K = num_layers, in their order.

    Entry i of the N + 1 `hidden_states` is the input of layer i, so these are the outputs of layers N-K to N-2. Raise
    `FeatureError` for a model without vLLM's own support for reading hidden states: for such a model it is unknown
    whether the sum of hidden state and residual is the right value.
    """
    named = ("aux_hidden_state_layers", "layers", "start_layer")
    backbones = [part for part in model.modules() if all(hasattr(part, name) for name in named)]
    advice = "train the predictor with --layers 1"
    if len(backbones) != 1:
        raise FeatureError(f"the decoder layers of {type(model).__name__} cannot be found: {advice}")
    (backbone,) = backbones
    first = len(backbone.layers) - num_layers
    if first < backbone.start_layer:
        raise FeatureError(f"the last {num_layers} layers are on several pipeline stages: {advice}")
    return list(backbone.layers)[first:-1]


def _sampled_positions(runner: Any, scheduler_output: Any) -> Any:
    """Return the indices of the step's tokens after which it samples: each row's last, and those before a draft token.

    The indices count the tokens of all rows, row after row.
    """
    import torch

    drafts = scheduler_output.scheduled_spec_decode_tokens
    positions: list[int] = []
    end = 0
    for name in runner.input_batch.req_ids:
        end += scheduler_output.num_scheduled_tokens[name]
        positions += range(end - len(drafts.get(name, ())) - 1, end)
    return torch.tensor(positions, device=runner.device)


def _rows(output: Any, positions: Any) -> Any:
    """Return the hidden states of a layer's output at these positions, with the residual added if any, in float32."""
    if not isinstance(output, tuple):
        return output[positions].float()
    hidden, residual = output
    return hidden[positions].float() + residual[positions].float()


@dataclass(slots=True)
class HradCounts:
    """Counters of a trained predictor: predictions (hints) made, steps in which it failed, and the time it took."""

    hints: int = 0
    hint_faults: int = 0  # steps
    hint_s: float = 0.0


class HradRunner:
    """Runs a trained predictor of how many of the next draft tokens the target accepts: none, some or all.

    It reads the target's hidden states, which `feature_hook` records. It never raises: if it fails in a step, there are
    no predictions (hints) for this step.
    """

    def __init__(self, hrad: Hrad, feature_hook: FeatureHook, clock: Callable[[], float] = time.perf_counter) -> None:
        self.feature_hook = feature_hook
        self._hrad = hrad
        self._clock = clock
        self.counts = HradCounts()

    def predict(self, sampled: Sequence[Sequence[int]], rows: Sequence[int]) -> dict[int, AcceptanceHint]:
        """Predict for each of `rows` whether the target will accept none, some or all of the next draft tokens.

        Return the hints by row index. `rows` are indices of rows of the last step, `sampled` the tokens that it sampled
        for each row of the batch. Return {} if the prediction fails.
        """
        if not rows:
            return {}
        start_s = self._clock()
        try:
            features = self.feature_hook.read(sampled, rows)
            found = dict(zip(rows, self._hrad.predict(features, _product), strict=True))
        except Exception:
            if not self.counts.hint_faults:
                log.exception(
                    "the target's features could not be read; the draft's confidence is used instead. Logged once"
                )
            self.counts.hint_faults += 1
            return {}
        self.counts.hints += len(found)
        self.counts.hint_s += self._clock() - start_s
        return found


class TrainedPredictor:
    """The trained predictor that the settings name, if any: loaded from disk and attached to the target.

    It predicts how many of the next draft tokens the target accepts: none, some or all.

    Every worker creates an instance. Only the worker whose drafts vLLM uses runs the predictor; the other workers
    contribute their shards of the embedding table.
    """

    def __init__(self, vllm_config: Any, is_output_rank: bool) -> None:
        self._vllm_config = vllm_config
        self._is_output_rank = is_output_rank
        self._model: Any = None
        self._embed: Callable[[Sequence[int]], Any] | None = None
        self.hrad: Hrad | None = None
        self.runner: HradRunner | None = None

    @property
    def feature_hook(self) -> FeatureHook | None:
        """The hook that records each step's features; None without a predictor."""
        return self.runner.feature_hook if self.runner else None

    def counts(self) -> dict[str, float]:
        """Return the predictor's counters by name; {} without a predictor."""
        return asdict(self.runner.counts) if self.runner else {}

    def configure(self, directory: Path | None) -> None:
        """Load the predictor in `directory` and use it in place of the old one; with None, use no predictor.

        If the new predictor does not fit the target, raise and keep the old one.
        """
        hrad, runner = None, None
        if directory is not None:
            hrad = read_hrad(directory)
            check_features(self._vllm_config, hrad.card.num_layers, hrad.card.hidden_len)
            if self._model is not None:
                runner = self._attach(hrad)
        if self.runner is not None:
            self.runner.feature_hook.close()
        self.hrad, self.runner = hrad, runner

    def load_model(self, model: Any) -> None:
        """Attach the predictor to the target `model`, which vLLM has loaded; raise if it does not fit."""
        self._model = model
        if self.hrad is not None:
            self.runner = self._attach(self.hrad)

    def predict(self, rows: Sequence[BatchRow], asked: Sequence[int]) -> dict[int, AcceptanceHint]:
        """Predict for each row in `asked` whether the target will accept none, some or all of the next draft tokens.

        Return the hints by row index. `rows` are all rows of the last step, `asked` are indices into `rows`. Return {}
        without a predictor, or if the prediction fails.
        """
        if self.runner is None:
            return {}
        return self.runner.predict([row.tokens[len(row.tokens) - row.num_new :].tolist() for row in rows], asked)

    def _attach(self, hrad: Hrad) -> HradRunner | None:
        if self._embed is None:
            self._embed = embedder(self._vllm_config, self._model, is_kept=self._is_output_rank)
        if not self._is_output_rank:
            return None
        return HradRunner(hrad, FeatureHook(self._model, hrad.card.num_layers, self._embed))


def _product(one: _Array, other: _Array) -> _Array:
    """Return the product of two matrices, computed on the target's own threads, which are idle at this time.

    NumPy would start its threads on the cores of the draft, and both would slow each other down.
    """
    import torch

    product: _Array = torch.matmul(torch.from_numpy(one), torch.from_numpy(other)).numpy()
    return product
