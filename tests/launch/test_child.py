"""Child processes: started as asked, waited for, heard when they fail, and gone after a stop."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbranch.launch.child import PIPE, Child, Idleness
from tests.world.schedule import Clock

SLEEPS = "import time; time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);" + SLEEPS
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid, flush=True)"


def python(program: str, *words: str) -> list[str]:
    return [sys.executable, "-c", program, *words]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


def test_it_gets_its_environment_its_cores_and_its_log(log: Path) -> None:
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    program = "import os; print(os.environ['COLOUR'], os.sched_getaffinity(0), os.getsid(0) == os.getpid())"
    child = Child(python(program), environment={"COLOUR": "blue"}, cores=[core], log_file=log)

    assert child.wait(120)
    assert child.log_tail() == f"blue {{{core}}} True"
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_not_there_are_named() -> None:
    with pytest.raises(OSError, match="cannot start a process on cores 100000; this process may use"):
        Child(python(SLEEPS), cores=[100_000])


def test_what_the_probe_finds_is_returned(log: Path) -> None:
    child = Child(python("print('up', flush=True);" + SLEEPS), log_file=log)
    found = child.wait_until(lambda: log.read_text() or None, 120, 0.01)
    child.stop(60)

    assert found == "up\n"
    assert child.exit_summary == "was ended by SIGTERM"


def test_a_child_that_ends_early_is_not_waited_for(log: Path) -> None:
    child = Child(python("raise SystemExit('no such model')"), log_file=log)

    assert child.wait_until(lambda: None, 600, 0.01) is None
    assert (child.exit_summary, child.returncode) == ("ended with code 1", 1)
    assert child.log_tail() == "no such model"


def test_a_child_that_is_never_up_is_given_up() -> None:
    child = Child(python(SLEEPS))
    try:
        assert child.wait_until(lambda: None, 0.1, 0.01) is None
        assert child.exit_summary == "is still running"
    finally:
        child.kill()


def test_one_that_does_not_listen_is_killed(log: Path) -> None:
    child = Child(python(DEAF), log_file=log)
    child.wait_until(lambda: log.read_text() or None, 120, 0.01)
    child.stop(0.1)

    assert child.exit_summary == "was ended by SIGKILL"
    child.stop(0.1)  # once more changes nothing


def test_a_group_is_killed_although_its_first_process_has_ended() -> None:
    child = Child(python(PARENT, SLEEPS), stdout=PIPE, has_group=True)
    grandchild = int(child.output.readline())
    child.wait(120)
    assert is_alive(grandchild)
    child.kill()

    end_s = time.monotonic() + 120
    while is_alive(grandchild) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not is_alive(grandchild)


def test_a_child_that_reads_ends_when_its_input_closes() -> None:
    child = Child(python("import sys; sys.exit(len(sys.stdin.read()))"), stdin=PIPE)
    child.input.write(b"four")
    child.close_input()

    assert child.wait(120)
    assert child.returncode == 4
    child.kill()


def test_a_listener_hears_every_line_and_may_outlive_the_pipe() -> None:
    heard: list[str] = []
    child = Child(
        [sys.executable, "-c", "import sys; print('one'); sys.stderr.write('two\\rthree\\n')"],
        stdout=PIPE,
        has_one_output=True,
    )
    thread = child.listen(heard.append)
    child.wait(120)
    child.kill()  # closes the pipe
    thread.join(120)

    assert sorted(heard) == ["one", "three", "two"]


def test_a_listener_that_fails_goes_on_reading() -> None:
    """Otherwise the child would stop when the pipe is full."""
    child = Child(python("print('x' * 79 + chr(10), end='', flush=True)\n" * 2000 + "print('end')"), stdout=PIPE)
    num_heard = 0

    def fail(line: str) -> None:
        nonlocal num_heard
        num_heard += 1
        raise OSError("the terminal is gone")

    thread = child.listen(fail)
    assert child.wait(120)
    thread.join(120)
    child.kill()
    assert num_heard == 2001


def processor_s(child: Child) -> float:
    work = child.work()
    assert work is not None
    return work[0]


def test_a_child_that_waits_is_idle_and_one_that_works_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the one that works has to wait for a core: what counts is the work that it has done."""
    clock = Clock()
    sleeper = Child(python("import time; print('here', flush=True); time.sleep(600)"), stdout=PIPE)
    worker = Child(python("print('here', flush=True)\nwhile True: pass"), stdout=PIPE)
    try:
        assert sleeper.output.readline() == worker.output.readline() == b"here\n"
        with monkeypatch.context() as patch:
            patch.setattr("specbranch.launch.child.time", SimpleNamespace(monotonic=clock))
            idle, busy = Idleness(sleeper), Idleness(worker)
            begun_s = processor_s(worker)
            end_s = time.monotonic() + 120
            while processor_s(worker) < begun_s + 0.3:
                assert time.monotonic() < end_s, "it has not got a core"
                time.sleep(0.01)
            clock.leap(2.5)
            assert (idle.seconds(), busy.seconds()) == (2.5, 0.0)
    finally:
        sleeper.kill()
        worker.kill()
