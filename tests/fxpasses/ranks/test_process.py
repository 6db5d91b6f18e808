"""Whether another process runs, as the operating system says."""

import dataclasses
import os
import subprocess
import sys

import pytest

from fxpasses.ranks import process
from fxpasses.ranks.process import Process

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="the system has no /proc")


@needs_proc
def test_a_killed_process_has_ended_before_and_after_its_parent_looks():
    child = subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(600)"], stdout=subprocess.PIPE)
    known = Process(Process.own().machine, child.pid, process._state(child.pid)[1])
    try:
        assert not known.has_ended()
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has no parent's attention yet
    assert known.has_ended()
    child.communicate()
    assert known.has_ended()


@needs_proc
def test_a_number_that_was_given_again_is_another_process():
    own = Process.own()
    assert not own.has_ended()
    assert dataclasses.replace(own, started="0").has_ended()


def test_nobody_tells_of_other_machines(monkeypatch, tmp_path):
    assert not Process("another boot pid:[1]", 1, "0").has_ended()
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert Process.own() == Process("", os.getpid(), "")
    assert not Process.own().has_ended()


@pytest.mark.parametrize("name", ["a (b) c", "x) R 1 2"])
def test_the_name_of_a_process_may_hold_anything(monkeypatch, tmp_path, name):
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 22))
    (tmp_path / "7" / "stat").write_text(f"7 ({name}) S {fields} 1234 5\n")
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert process._state(7) == ("S", "1234")
