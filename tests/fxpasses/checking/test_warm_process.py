"""A script run in forks of a warm process behaves as one that is run alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fxpasses.checking.bisecting import warm_process
from fxpasses.checking.bisecting.warm_process import Runner

SCRIPT = """
import atexit, os, sys, time
atexit.register(print, "the end")
print(__name__, sys.argv[1:], os.environ.get("HOW"), sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
how = os.environ.get("HOW")
if how == "raises":
    raise ValueError("no")
if how == "hangs":
    time.sleep(600)
sys.exit({"says": "a reason", "three": 3}.get(how))
"""


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """The warm process imports little: it is the forks that are tested."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    real = subprocess.Popen

    def popen(command, **how):
        code = command[-1].replace(
            "; serve()",
            ", _IMPORTS; import fxpasses.checking.bisecting.warm_process as w; w._IMPORTS = (); serve()",
        )
        return real([*command[:-1], code], **{**how, "env": {**environment, **how["env"]}})

    monkeypatch.setattr(warm_process.subprocess, "Popen", popen)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def test_status_and_output(script, tmp_path):
    output = tmp_path / "output.txt"
    with Runner([str(script), "-a", "b"], {"ALL": "1"}) as runner:
        status, text = runner.run({}, output, None)
        assert status == 0
        assert text == "__main__ ['-a', 'b'] None True\nthe end\n"
        assert runner.run({"HOW": "three"}, output, None)[0] == 3
        status, text = runner.run({"HOW": "raises"}, output, None)
        assert status == 1
        assert "ValueError: no" in text
        status, text = runner.run({"HOW": "says"}, output, None)
        assert status == 1
        assert "a reason" in text
        assert runner.run({}, output, None)[1].count("None") == 1  # nothing of an earlier run is left


def test_a_run_that_takes_too_long_is_killed(script, tmp_path):
    with Runner([str(script)], {}) as runner:
        assert runner.run({"HOW": "hangs"}, tmp_path / "output.txt", 0.5)[0] is None
        assert runner.run({}, tmp_path / "output.txt", None)[0] == 0


def test_nothing_runs_on_when_the_asker_is_killed(script, tmp_path):
    running = tmp_path / "running"
    script.write_text(
        f"import os, time\nopen({str(running)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; import fxpasses.checking.bisecting.warm_process as w\n"
            f"w.Runner([{str(script)!r}], {{}}).run({{}}, pathlib.Path({str(tmp_path / 'out')!r}), None)",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while not (running.exists() and running.read_text()):
        assert asker.poll() is None
        time.sleep(0.05)
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    process = int(running.read_text())
    for _ in range(600):
        if not _is_alive(process):
            return
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    raise AssertionError("the script runs on")


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as state:
            return state.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_forks_each_run_is_a_process(script, tmp_path, monkeypatch):
    monkeypatch.delattr(warm_process.os, "fork")
    with Runner([str(script)], {}) as runner:
        status, text = runner.run({"HOW": "three"}, tmp_path / "output.txt", None)
    assert (status, json.dumps(text).count("three")) == (3, 1)
