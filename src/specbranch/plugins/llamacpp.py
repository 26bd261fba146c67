"""Drafts for llama-cpp-python: `Llama("target.gguf", draft_model=DraftModel("target.gguf", settings))`.

llama-cpp-python samples every token itself and keeps draft tokens as long as they are the ones it sampled. So the
output is that of the same `Llama` without a draft model, greedy or sampled. Two things are to be known: with any draft
model it keeps the logits of all `n_ctx` positions, and logits processors see draft tokens that are not accepted yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specbranch.engines.extras import extra
from specbranch.engines.llamacpp import gguf_path, refuse_recurrent
from specbranch.engines.protocol import EngineError
from specbranch.engines.vocabulary import VocabSample, read_vocabulary, sampled
from specbranch.plugins.settings import DraftSettings
from specbranch.plugins.text_drafts import TextDrafts

with extra("llamacpp"):
    from llama_cpp.llama_speculative import LlamaDraftModel


class DraftModel(LlamaDraftModel):
    """Asks a draft service what a `Llama` is to verify next. `target` is the GGUF file of that `Llama`.

    One `Llama` has one of these; it is never held up and never fails by it.
    """

    def __init__(self, target: str | Path, settings: DraftSettings, longest: int = 8) -> None:
        path = gguf_path(str(target))
        refuse_recurrent(path, "so rejected draft tokens would stay in it; leave draft_model out")
        vocabulary = read_vocabulary(str(path))
        if vocabulary is None:
            raise EngineError(f"{path} names no tokens, so no draft can be compared with it; use another GGUF file")
        self._drafts = TextDrafts(settings, longest, VocabSample(vocabulary.size, sampled(vocabulary)))

    @property
    def num_accepted(self) -> int:
        """Draft tokens that the target has kept so far."""
        return self._drafts.num_accepted

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Tokens that may follow; none where there are none in time."""
        return np.array(self._drafts.after(input_ids), dtype=np.intc)
