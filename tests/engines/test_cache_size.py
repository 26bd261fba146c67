"""How large a cache of no given size is."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbranch.engines.kv_cache import MOST, USUAL, cache_size, cache_tokens
from specbranch.machine import free_host_memory, process_memory

GB = 10**9


@pytest.mark.parametrize(
    ("free", "per_token", "is_cpu", "tokens"),
    [
        (100 * GB, 10_000, True, 1_000_000),  # a tenth
        (20 * GB, 100_000, True, USUAL),  # a tenth holds 20,000; the usual size fits into a quarter
        (10 * GB, 100_000, True, 25_000),  # a quarter
        (20 * GB, 100_000, False, 150_000),  # three quarters
    ],
)
def test_a_cache_takes_its_share_of_the_free_memory(free: int, per_token: int, is_cpu: bool, tokens: int) -> None:
    assert cache_tokens(per_token, free, is_cpu=is_cpu) == tokens // 256 * 256


def test_a_cache_is_no_larger_than_what_is_of_use() -> None:
    assert cache_size(None, 1000, 900 * GB, is_cpu=False).tokens == MOST
    assert cache_size(None, 1000, 900 * GB, is_cpu=True, most=5000).tokens == 5000


@pytest.mark.parametrize("is_cpu", [True, False])
def test_with_too_little_memory_a_cache_has_the_fewest_tokens_that_are_of_use(is_cpu: bool) -> None:
    """A draft that is started again beside its target finds little memory, and must come back all the same."""
    assert cache_size(None, 400_000, GB, is_cpu=is_cpu).tokens == 4096


def test_what_was_asked_for_stands_whatever_is_free() -> None:
    size = cache_size(50_000, 100_000, 1, is_cpu=True)

    assert size.tokens == 50_000
    assert str(size) == "50,000 tokens, 5.0 GB: as asked for"


def test_the_size_says_how_it_was_chosen() -> None:
    assert str(cache_size(None, 10_000, 100 * GB, is_cpu=True)) == (
        "999,936 tokens, 10.0 GB: by the 100.0 GB of memory that are free"
    )
    assert "nobody tells" in str(cache_size(None, 1000, None, is_cpu=False))
    assert cache_size(None, 1000, None, is_cpu=False).tokens == USUAL


def test_free_memory_is_the_hosts_or_what_a_container_leaves(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert free_host_memory(tmp_path) is None

    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert free_host_memory(tmp_path) == 1_024_000

    (group / "memory.max").write_text("1000000\n")
    assert free_host_memory(tmp_path) == 600_000
    assert free_host_memory() is not None


def test_a_process_holds_what_the_system_says(tmp_path: Path) -> None:
    before = process_memory()
    held = b"x" * 50_000_000
    after = process_memory()

    assert before is not None and after is not None
    assert 0.9 * len(held) < after - before < 2 * len(held)
    assert process_memory(tmp_path) is None
