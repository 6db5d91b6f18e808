"""The commands for custom operators are reached through ``python -m fxpasses``."""

import pytest

from fxpasses.cli import main

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


def test_opcheck_and_probe(operator, capsys):
    assert main(["opcheck", *operator]) == 0
    assert "2 of 2 samples passed" in capsys.readouterr().out
    assert main(["probe", *operator]) == 0
    assert "torch.empty_strided" in capsys.readouterr().out


def test_passes_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["passes"]) == 0
    listed = capsys.readouterr().out
    assert "eliminate_dead_code" in listed
    assert "max_bytes=65536 min_calls=4" in listed
    assert main(["passes", "fold_constants{max_bytes=16},eliminate_dead_code"]) == 0
    told = capsys.readouterr().out
    assert "fold_constants{max_bytes=16}" in told
    assert "numerics: bitwise" in told


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["opchek"])
    assert caught.value.code == 2
    assert "demo" in capsys.readouterr().err


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
        ("models.py", "has no ':FUNCTION' at its end"),
        ("elsewhere.py:model", "there is no file 'elsewhere.py'"),
        ("nowhere_at_all:model", "there is no module 'nowhere_at_all'"),
        ("models.py:other", "'models.py' has no 'other'"),
        ("models.py:alone", "alone() returned int; it has to return a pair"),
    ],
)
def test_check_says_what_is_wrong_with_its_argument(model, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text("def alone():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["check", model])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_check_says_that_the_model_itself_raises(tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text(
        "import torch\ndef raises():\n    return (lambda x: x[7]), (torch.ones(3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IndexError) as caught:
        main(["check", "raises.py:raises", "--compiler", "eager"])
    assert any("the model itself, in eager" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "arguments", [["passes", ""], ["passes", ","], ["passes", "--bogus"], ["passes", "bogus"]]
)
def test_a_list_of_no_passes_is_an_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err
