"""Energy counters: summed over packages, or none."""

from __future__ import annotations

from pathlib import Path

from specbranch.bench.energy import read_joules


def test_packages_are_summed_and_parts_of_them_left_out(tmp_path: Path) -> None:
    for name, value in (("intel-rapl:0", "1500000"), ("intel-rapl:1", "500000"), ("intel-rapl:0:0", "7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(value)

    assert read_joules(tmp_path) == 2.0


def test_a_machine_that_cannot_tell_says_so(tmp_path: Path) -> None:
    assert read_joules(tmp_path) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert read_joules(tmp_path) is None
