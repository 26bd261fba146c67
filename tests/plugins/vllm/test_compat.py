"""Workarounds for vLLM's sampler on the CPU: applied where they are needed, and nowhere else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specbranch.plugins.vllm import compat


def right_expand(x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    return compat._expand_batch_to_tokens(x, ends, num_tokens, replace_from, replace_to)


def unfit_expand(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("Cannot inspect kernel parameters for function")


def sampler(monkeypatch: pytest.MonkeyPatch, is_cpu: bool = True, **parts: Any) -> Any:
    """A vLLM whose sampler has these parts in place of right ones."""
    right = {"expand_batch_to_tokens": right_expand, "apply_top_k_top_p": lambda logits, k, p: logits}
    module = SimpleNamespace(**{**right, **parts})
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm.v1.sample", SimpleNamespace(rejection_sampler=module))
    for package in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    return module


def test_a_sampler_without_faults_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sampler(monkeypatch)
    own = vars(module).copy()

    assert compat.patch_cpu_sampler() == []
    assert vars(module) == own


def test_nothing_is_touched_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sampler(monkeypatch, is_cpu=False, expand_batch_to_tokens=unfit_expand)

    assert compat.patch_cpu_sampler() == []
    assert module.expand_batch_to_tokens is unfit_expand


def test_a_sampler_that_holds_kernels_of_triton_gets_those_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM 0.30: the module has the CPU's kernels, what calls them has others."""
    triton, own = object(), object()
    dispatcher = SimpleNamespace(kernel=triton)
    parts: dict[str, Any] = {"_rejection_greedy_sample": dispatcher, "rejection_greedy_sample_kernel": own}
    sampler(monkeypatch, expand_batch_to_tokens=unfit_expand, **parts)

    assert compat.patch_cpu_sampler() == ["rejection_greedy_sample_kernel", "expand_batch_to_tokens"]
    assert dispatcher.kernel is own
    assert compat.patch_cpu_sampler() == []  # a second time there is nothing left to do


def test_a_fault_with_no_rows_is_worked_around(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(logits: Any, k: Any, p: Any) -> Any:
        if not len(logits):
            raise RuntimeError("no rows")
        return logits + 1

    module = sampler(monkeypatch, apply_top_k_top_p=apply)

    assert compat.patch_cpu_sampler() == ["apply_top_k_top_p"]
    assert module.apply_top_k_top_p(torch.zeros(0, 4), None, None).shape == (0, 4)
    assert module.apply_top_k_top_p(torch.zeros(1, 2), None, None).tolist() == [[1.0, 1.0]]
