"""The command ``fxpasses``: what each prints, its exit status, and what a mistake costs: one line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fxpasses
from fxpasses.commands.main import COMMANDS, SHELLS, main
from fxpasses.tuning.kept import ResultLocation, TuningResult, add_to_report
from fxpasses.tuning.tuning_ledger import Entry

MODULE = """
import torch

@torch.library.custom_op("fxpasses_cli_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@double.register_fake
def _(x):
    return torch.empty_like(x)
"""


@pytest.fixture
def operator(tmp_path, monkeypatch):
    (tmp_path / "cli_operator.py").write_text(MODULE)
    samples = tmp_path / "samples.py"
    samples.write_text("import torch\nsamples = [((torch.randn(3, 4),), {}), ((torch.randn(5),), {})]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["cli_operator:double", "--samples", str(samples)]


def told(arguments, capsys, status=0):
    assert main(arguments) == status
    return capsys.readouterr().out


def test_opcheck_and_probe(operator, capsys):
    assert "2 of 2 samples passed" in told(["opcheck", *operator], capsys)
    assert [sample["ok"] for sample in json.loads(told(["opcheck", *operator, "--json"], capsys))] == [
        True
    ] * 2
    assert "torch.empty_strided" in told(["probe", *operator], capsys)
    assert json.loads(told(["probe", *operator, "--json"], capsys))["decided"]


def test_an_operator_of_a_file(tmp_path, capsys):
    file = tmp_path / "operators.py"
    file.write_text(MODULE.replace("double", "twice") + "samples = [(torch.ones(3),)]\n")
    assert "1 of 1 samples passed" in told(["opcheck", f"{file}:twice", "--samples", str(file)], capsys)


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ["twice"],
            "samples = [(1,)]",
            "expected FILE.py:OPERATOR, MODULE:OPERATOR or namespace::name, got 'twice'",
        ),
        (["ns::op"], "samples = []", "holds no call"),
        (["ns::op"], "samples = 3", "holds no call"),
        (["ns::op"], "import torch\nsamples = [torch.ones(2)]", "not a tuple of arguments"),
        (["ns::op"], "pass", "must define `samples`"),
        (["aten::sinn"], "samples = [(1,)]", "there is no operator"),
        (["no_such_module:op"], "samples = [(1,)]", "there is no module"),
        (["torch:sinn"], "samples = [(1,)]", "did you mean 'sin'"),
        (["aten::sin"], None, "there is no file"),
        (["json:loads"], "samples = [(1,)]", "must be instance of torch._ops.OpOverload"),
    ],
)
@pytest.mark.parametrize("command", ["opcheck", "probe"])
def test_an_operator_or_samples_that_are_not_there(command, arguments, text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "samples.py").write_text(text)
    assert main([command, *arguments, "--samples", str(tmp_path / "samples.py")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_check_that_opcheck_does_not_have(operator, capsys):
    assert main(["opcheck", *operator, "--check", "test_shema"]) == 2
    assert "did you mean 'test_schema'?" in capsys.readouterr().err


def test_passes_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    listed = told(["passes"], capsys)
    assert "eliminate_dead_code\n" in listed
    assert "fold_constants max_bytes=65536 min_calls=4\n" in listed  # a line that is searched for stays whole
    assert {item["name"] for item in json.loads(told(["passes", "--json"], capsys))} == set(
        fxpasses.available_passes()
    )


@pytest.mark.parametrize(
    "names",
    [
        ["fold_constants{max_bytes=16},eliminate_dead_code"],
        ["fold_constants{max_bytes=16}", "eliminate_dead_code"],
    ],
)
def test_all_about_some_passes(names, capsys):
    shown = told(["passes", *names], capsys)
    assert "fold_constants{max_bytes=16}" in shown
    assert "numerics: bitwise" in shown
    assert "eliminate_dead_code\n" in shown
    first, second = json.loads(told(["passes", *names, "--json"], capsys))
    assert first["options"]["max_bytes"] == 16
    assert second["documentation"]


@pytest.mark.parametrize("arguments", [["passes", ""], ["passes", ","], ["passes", "fold_constants", " "]])
def test_a_list_of_no_passes_is_an_error(arguments, capsys):
    assert main(arguments) == 2
    assert "no pass is named" in capsys.readouterr().err


def test_a_pass_that_does_not_exist(capsys):
    assert main(["passes", "fold_constant"]) == 2
    assert "did you mean 'fold_constants'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"), [(["opchek"], "did you mean 'opcheck'?"), (["passes", "--bogus"], "--bogus")]
)
def test_a_command_line_that_does_not_exist(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_options_behind_a_script_belong_to_the_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", "script.py", "--output", "elsewhere"]) == 0
    said = capsys.readouterr()
    assert "--output comes after the script" in said.err
    assert "The script did not fail" in said.out
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models.py", "expected FILE.py:FUNCTION or MODULE:FUNCTION, got 'models.py'"),
        ("models.py:", "expected FILE.py:FUNCTION or MODULE:FUNCTION, got 'models.py:'"),
        ("models:alone", "there is no module 'models'; for the file, write models.py:alone"),
        ("..models:alone", "there is no module '..models'"),
        ("elsewhere.py:model", "there is no file 'elsewhere.py'"),
        ("nowhere_at_all:model", "there is no module 'nowhere_at_all'"),
        ("json.nowhere:model", "there is no module 'json.nowhere'"),
        ("models.py:other", "'models.py' has no function 'other'"),
        ("models.py:number", "'models.py' has no function 'number'"),
        ("binary.py:make", "'binary.py' is not Python: "),
        ("models.py:alone", "alone() returned int; it has to return a pair"),
        ("models.py:no_model", "no_model() returned (int, tuple); it has to return a pair"),
        (
            "models.py:takes",
            "models.py:takes: missing a required argument: 'x'; it is called without arguments",
        ),
    ],
)
@pytest.mark.parametrize("command", [["check"], ["prove", "fold_constants", "--model"]])
def test_a_model_that_is_not_there(command, model, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    (tmp_path / "models.py").write_text(
        "number = 3\ndef alone():\n    return 3\ndef no_model():\n    return 3, ()\ndef takes(x): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([*command, model]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", 'File "models.py", line 1: def f(:'),
        ("open('/nowhere/at/all')", "File \"models.py\", line 1: open('/nowhere/at/all')"),
        ("raise SystemExit(5)", "SystemExit: 5"),
    ],
)
def test_what_the_users_own_file_raises_is_told_with_its_line(text, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for command in (["check", "models.py:f"], ["opcheck", "aten::sin", "--samples", "models.py"]):
        assert main(command) == 3
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "/"],
        ["report", "no_text"],
        ["inspect", "nothing.fxp"],
        ["cache", "list", "--only", "fake", "--fake-directory", "nothing"],
        ["bisect", "--timeout", "-1", "nothing.py"],
        ["prove", "default"],
    ],
)
def test_one_line_for_what_is_not_there(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_text").mkdir()
    (tmp_path / "no_text" / "graph.json").write_bytes(b"\xff\xfe")
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["report", ""], ["check", ""], ["bisect", ""], ["prove", ""], ["inspect", ""]]
)
def test_an_empty_name_is_none(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "expected a name, got ''" in capsys.readouterr().err


def test_check_says_that_the_model_itself_raises_and_where(tmp_path, monkeypatch, capsys):
    (tmp_path / "raises.py").write_text(
        "import torch\ndef raises():\n    return (lambda x: x[7]), (torch.ones(3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["check", "raises.py:raises", "--compiler", "eager"]
    assert main(command) == 3
    err = capsys.readouterr().err
    assert "IndexError: index 7 is out of bounds" in err
    assert 'raises.py", line 3' in err
    assert "the model itself, in eager" in err
    assert "Traceback" not in err
    with pytest.raises(IndexError):
        main([*command, "--debug"])


@pytest.mark.slow
def test_caches_are_sized_up_verified_and_cleared(tmp_path, capsys):
    fill = (
        "import torch, fake\nwith fake.FakeTensorMode():\n    (torch.ones(2, 3) @ torch.ones(3, 4)).sum()\n"
    )
    with_cache = os.environ | {"FAKE_DISPATCH_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", fill], check=True, env=with_cache)
    (tmp_path / "mine.txt").write_text("not of the cache")
    cache = ["--only", "fake", "--fake-directory", str(tmp_path)]
    (entry,) = json.loads(told(["cache", "list", *cache, "--json"], capsys))
    assert entry["bytes"] > 0
    assert "files read: 1, damaged: 0" in told(["cache", "verify", *cache], capsys)
    segment = tmp_path / entry["path"]
    segment.write_bytes(segment.read_bytes()[:-1])
    assert "its checksum does not fit" in told(["cache", "verify", *cache], capsys, status=1)
    assert main(["cache", "clear", *cache]) == 2
    assert "--yes" in capsys.readouterr().err
    assert segment.exists()
    assert "1 files" in told(["cache", "clear", *cache, "--yes"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_results_of_tuning_are_told_compared_verified_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path / "cache"))
    assert json.loads(told(["ledger", "--json"], capsys)) == []
    entries = [
        Entry("g", name, "kept", ratio=0.8, low=0.7, high=0.9, verdict="EQUAL") for name in ("one", "two")
    ]
    ResultLocation.in_cache("auto", "g", "family", {}).write(TuningResult("g", (), tuple(entries)))
    assert "0.80 [0.70, 0.90]" in told(["ledger"], capsys)
    (shown,) = json.loads(told(["ledger", "--step", "tw", "--json"], capsys))
    assert Entry.from_data(shown) == entries[1]
    before = tmp_path / "before.json"
    better = [dataclasses.replace(e, ratio=0.5, low=0.4, high=0.6) for e in entries[:1]]
    before.write_text(json.dumps([entry.to_data() for entry in better]))
    compared = json.loads(told(["ledger", "--against", str(before), "--json"], capsys, status=1))
    assert [one["change"] for one in compared] == ["loses", "new"]
    assert "loses" in told(["ledger", "--against", str(before)], capsys, status=1)
    report = tmp_path / "report"
    add_to_report(str(report), TuningResult("g", (), tuple(better)))
    for path in (report, report / "ledger.json"):
        assert json.loads(told(["ledger", str(path), "--json"], capsys)) == [better[0].to_data()]
    other = dataclasses.replace(better[0], situation="inference, 1 threads, time, 0")
    before.write_text(json.dumps([one.to_data() for one in (better[0], other)]))
    assert "inference, 1 threads" in told(["ledger", str(before)], capsys)
    before.write_text("{}")
    for path in (before, tmp_path / "nothing.json"):
        assert main(["ledger", "--against", str(path)]) == 2
        error = capsys.readouterr().err
        assert ("is no ledger" if path == before else "cannot be read") in error
    with monkeypatch.context() as patch:
        patch.setenv("FXPASSES_CACHE_DIR", "off")
        assert main(["ledger"]) == 2
        assert "FXPASSES_CACHE_DIR is 'off'" in capsys.readouterr().err

    only = ["--only", "tuned"]
    (listed,) = json.loads(told(["cache", "list", *only, "--json"], capsys))
    assert "files read: 1, damaged: 0" in told(["cache", "verify", *only], capsys)
    path = Path(listed["path"])
    path.write_text(path.read_text()[:-3])
    assert "is no result of tuning" in told(["cache", "verify", *only], capsys, status=1)
    assert "1 files" in told(["cache", "clear", *only, "--yes"], capsys)
    assert not path.exists()


def test_inductors_entries_are_read_without_being_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "fxgraph").mkdir()
    (tmp_path / "fxgraph" / "whole").write_bytes(b"\x80\x04K\x01.")
    (tmp_path / "fxgraph" / "cut").write_bytes(b"\x80\x04K")
    found = json.loads(told(["cache", "verify", "--only", "inductor", "--json"], capsys, status=1))
    assert (found["files"], found["damaged"]) == (2, 1)
    assert found["problems"][0]["path"].endswith("cut")


def test_help_version_and_completion_do_without_torch():
    program = (
        "import sys\nfrom fxpasses.commands.main import main\n"
        "for arguments in (['--help'], ['--version'], *([c, '--help'] for c in sys.argv[1:]), ['passes', '']):\n"
        "    try: main(arguments)\n    except SystemExit as done: assert done.code == 0, arguments\n"
        "main(['completion', 'bash'])\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"fxpasses {fxpasses.__version__} (torch " in done.stdout
    assert all(f"--{option}" in done.stdout for option in ("torch", "samples", "seconds", "json", "debug"))


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_the_commands(shell, capsys):
    script = told(["completion", shell], capsys)
    assert "fxpasses" in script
    assert all(name in script for name in COMMANDS)


def test_interrupting_tells_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "fxpasses", "check", "slow.py:model"]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that started the tests in the background has them ignore the signal, and so what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout.readline() == "here\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == "fxpasses check: interrupted\n"


def test_bisect_of_what_is_not_python_is_refused_at_once(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("def (")
    assert main(["bisect", str(script)]) == 2
    assert "is not Python: invalid syntax" in capsys.readouterr().err


def test_a_reader_that_is_gone_ends_a_command_quietly(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["passes"]) == 0  # as in `fxpasses passes | head -1`; rich raises a SystemExit then
    assert capsys.readouterr().err == ""
