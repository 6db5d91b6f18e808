"""generate_opcheck_tests: one check for every call of an operator in existing tests, with expected failures."""

from __future__ import annotations

import json
import unittest

import pytest
import torch

from fake.library import Library
from fake.library.errors import OpCheckError
from fake.library.opcheck import (
    DEFAULT_TEST_UTILS,
    FailuresDict,
    OpCheckMode,
    dont_generate_opcheck_tests,
    generate_opcheck_tests,
    generate_repro,
    is_inside_opcheck_mode,
    validate_failures_dict_formatting,
    validate_failures_dict_structure,
)
from tests.fake.library.support import overload_of

NS = "generated_opcheck_tests"


@pytest.fixture(scope="module")
def ops():
    lib = Library(NS, "FRAGMENT")
    lib.define("aliases(Tensor x) -> Tensor")
    lib.impl("aliases", lambda x: x[:], "CompositeExplicitAutograd")
    lib.define("no_fake(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl("no_fake", lambda x: x.clone(), "CPU")
    yield {name: overload_of(f"{NS}::{name}") for name in ("aliases", "no_fake")}
    lib._destroy()


def make_case(ops, path, failures=None, **options):
    FailuresDict(path, failures or {}).save()

    class Case(unittest.TestCase):
        def test_mm(self):
            x = torch.randn(2, 3, requires_grad=True)
            result = torch.ops.aten.mm.default(x, torch.randn(3, 5))
            assert result.shape == (2, 5)

        def test_mm_meta(self):
            torch.ops.aten.mm.default(torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta"))

        def test_packet(self):
            torch.ops.aten.sin_(torch.randn(3))

        def test_aliases(self):
            ops["aliases"](torch.randn(3))

        def test_no_fake(self):
            ops["no_fake"](torch.randn(3))

        @dont_generate_opcheck_tests("tests something else")
        def test_left_alone(self):
            ops["aliases"](torch.randn(3))

    generate_opcheck_tests(Case, ["aten", NS], str(path), **options)
    return Case


def run(case, test):
    result = unittest.TestResult()
    case(test).run(result)
    return result


def failure_of(result):
    problems = result.failures + result.errors
    return problems[0][1] if problems else None


def test_generated_names(ops, tmp_path):
    case = make_case(ops, tmp_path / "f.json")
    for check in DEFAULT_TEST_UTILS:
        assert hasattr(case, f"{check}__test_mm")
        assert not hasattr(case, f"{check}__test_left_alone")
    with pytest.raises(OpCheckError, match="already has method"):
        generate_opcheck_tests(case, ["aten"], str(tmp_path / "f.json"))


def test_generated_tests_check(ops, tmp_path):
    case = make_case(ops, tmp_path / "f.json")
    for test in ("test_schema__test_mm", "test_faketensor__test_mm_meta", "test_schema__test_packet"):
        assert failure_of(run(case, test)) is None
    text = failure_of(run(case, "test_schema__test_aliases"))
    assert "is not defined to alias output" in text
    assert "BEGIN REPRO SCRIPT" in text
    assert f"op = torch.ops.{NS}.aliases.default" in text
    assert "no_fake" in failure_of(run(case, "test_faketensor__test_no_fake"))


def test_expected_failures(ops, tmp_path):
    expected = {
        f"{NS}::aliases": {"Case.test_schema__test_aliases": {"comment": "known", "status": "xfail"}},
        f"{NS}::no_fake": {"Case.test_faketensor__test_no_fake": {"comment": "", "status": "skip"}},
        "aten::mm": {"Case.test_schema__test_mm": {"comment": "", "status": "xfail"}},
    }
    case = make_case(ops, tmp_path / "f.json", expected)
    assert failure_of(run(case, "test_schema__test_aliases")) is None
    assert failure_of(run(case, "test_faketensor__test_no_fake")) is None
    assert "Unexpected success for operator aten::mm" in failure_of(run(case, "test_schema__test_mm"))


def test_accepting_failures(ops, tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    expected = {"aten::mm": {"Case.test_schema__test_mm": {"comment": "", "status": "xfail"}}}
    case = make_case(ops, path, expected)
    monkeypatch.setenv("PYTORCH_OPCHECK_ACCEPT", "1")
    assert failure_of(run(case, "test_schema__test_aliases")) is None
    assert failure_of(run(case, "test_schema__test_mm")) is None
    saved = FailuresDict.load(path).data
    assert saved == {f"{NS}::aliases": {"Case.test_schema__test_aliases": {"comment": "", "status": "xfail"}}}


def test_compliance_tag(ops, tmp_path):
    expected = {f"{NS}::no_fake": {"Case.test_faketensor__test_no_fake": {"comment": "", "status": "xfail"}}}
    case = make_case(ops, tmp_path / "f.json", expected)
    text = failure_of(run(case, f"test_pt2_compliant_tag_{NS}_no_fake"))
    assert "was tagged with torch.Tag.pt2_compliant_tag" in text
    decorated = make_case(
        ops,
        tmp_path / "g.json",
        expected,
        additional_decorators={f"test_pt2_compliant_tag_{NS}_no_fake": [unittest.expectedFailure]},
    )
    assert failure_of(run(decorated, f"test_pt2_compliant_tag_{NS}_no_fake")) is None


def test_is_inside_opcheck_mode():
    assert not is_inside_opcheck_mode()
    with OpCheckMode(["foo"], "bar", lambda x: x, None, "baz", "brr"):
        assert is_inside_opcheck_mode()
    assert not is_inside_opcheck_mode()


def entry(name, **change):
    return {"aten::mm": {name: {"comment": "", "status": "xfail"} | change}}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (entry("Case.test_schema__test_mm", status="success"), "got status=success"),
        (entry("Case.test_aot_dispatch__test_mm"), "should begin with one of"),
        (entry("Case.test_schema__test_nope"), "does not exist on the TestCase"),
        ({"aten::mm": {"Case.test_schema__test_mm": {"status": "xfail"}}}, "keys 'comment' and 'status'"),
    ],
)
def test_wrong_entries(ops, tmp_path, data, match):
    case = make_case(ops, tmp_path / "f.json")
    with pytest.raises(RuntimeError, match=match):
        validate_failures_dict_structure(FailuresDict("", data), DEFAULT_TEST_UTILS, case)


def test_file_format(tmp_path):
    path = tmp_path / "f.json"
    with pytest.raises(FileNotFoundError):
        FailuresDict.load(path)
    FailuresDict.load(path, create_file=True)
    validate_failures_dict_formatting(path)
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(RuntimeError, match="formatted a certain way"):
        validate_failures_dict_formatting(path)
    path.write_text('{"data": {}, "_version": 7}')
    with pytest.raises(AssertionError, match="_version"):
        FailuresDict.load(path)


def test_repro_runs(ops):
    text = generate_repro("test_schema", torch.ops.aten.sin.default, (torch.ones(2),), {}, save_data=False)
    assert "args = ()" in text
    saved = generate_repro("test_schema", torch.ops.aten.sin.default, (torch.ones(2),), {}, save_data=True)
    exec(compile(saved, "repro", "exec"), {})
    path = saved.split('torch.load("')[1].split('"')[0]
    (tensor,), kwargs = torch.load(path)
    assert kwargs == {}
    assert tensor.shape == (2,)
    dry = generate_repro("test_schema", torch.ops.aten.sin.default, (), {}, save_data=True, dry_run=True)
    with pytest.raises(FileNotFoundError):
        torch.load(dry.split('torch.load("')[1].split('"')[0])
