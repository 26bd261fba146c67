"""What the system tells of NUMA nodes and GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbranch import machine
from specbranch.machine import Topology, num_gpus, parse_cores, read_topology, visible_gpus


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_device(system: Path, name: str, **files: str) -> None:
    for file, text in files.items():
        write(system / "bus/pci/devices" / name / file.rstrip("_"), text)


def test_nodes_cores_and_gpus_are_read_from_the_system(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/node/node0/cpulist", "0-1,4")
    write(tmp_path / "devices/system/node/node1/cpulist", "2-3")
    write(tmp_path / "devices/system/node/node2/cpulist", "")  # memory only
    add_device(tmp_path, "01", vendor="0x10de", class_="0x030200", numa_node="1")
    add_device(tmp_path, "02", vendor="0x10de", class_="0x030000", numa_node="1")
    add_device(tmp_path, "03", vendor="0x1a03", class_="0x030000", numa_node="0")  # the board's own graphics
    add_device(tmp_path, "04", vendor="0x10de", class_="0x040300", numa_node="0")  # sound
    add_device(tmp_path, "05", vendor="0x1002", class_="0x120000", numa_node="-1")
    add_device(tmp_path, "06", vendor="0x1002", class_="0x120000", numa_node="0")

    assert read_topology(tmp_path) == Topology({0: (0, 1, 4), 1: (2, 3)}, {1: 2, 0: 1})
    assert read_topology(tmp_path / "nowhere") == Topology()


def test_this_machine_has_a_node_with_our_cores() -> None:
    here = read_topology()
    if not here.cores:
        pytest.skip("this system tells of no NUMA nodes")

    assert os.sched_getaffinity(0) <= {core for own in here.cores.values() for core in own}


def test_core_lists_are_ranges_and_numbers() -> None:
    assert parse_cores("0-2,8,10-11") == (0, 1, 2, 8, 10, 11)
    assert parse_cores("") == ()


@pytest.mark.parametrize(
    ("installed", "visible", "count"),
    [
        (4, None, 4),
        (4, "1,2", 2),
        (4, "0,7,1", 1),
        (4, "", 0),
        (4, "-1", 0),
        (4, "GPU-12ab,GPU-34cd", 2),
        (0, "0,1", 0),
    ],
)
def test_only_visible_gpus_count(installed: int, visible: str | None, count: int) -> None:
    assert visible_gpus(installed, visible) == count


def test_gpus_are_counted_by_nvidias_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = -L ] && printf "GPU 0: A (UUID: x)\\n  MIG 1g (UUID: y)\\nGPU 1: B (UUID: z)\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "read_topology", lambda: Topology(gpus={0: 3}))
    counts = []
    for prepare in (lambda: None, lambda: tool.write_text("#!/bin/sh\nexit 9\n"), tool.unlink):
        prepare()
        machine._list_gpus.cache_clear()
        counts.append(num_gpus())
    machine._list_gpus.cache_clear()

    assert counts == [2, 3, 3]  # without the tool, by the bus
