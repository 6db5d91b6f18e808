"""The conformance program itself: what it sees, how it judges, what it prints."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from benchmarks.conformance import Options, Tally, Verdict, make_mode, observe, sweep
from benchmarks.conformance.command import main
from benchmarks.conformance.compare import Outcome, compare, of_error
from benchmarks.conformance.explain import first_difference
from benchmarks.conformance.known import is_known
from benchmarks.conformance.layouts import LAYOUTS, OUT_KINDS, make_out, relayout
from benchmarks.conformance.report import Case
from benchmarks.conformance.subjects import entry_name, names, subjects


def test_views_and_the_same_object_are_told_from_copies():
    x = torch.zeros(2, 3)
    view, same, copy, view_of_copy = observe((x.t(), x, c := x.clone(), c[0]), [x]).leaves
    assert (view.shares, view.same_object_as) == (0, 1)
    assert (same.shares, same.same_object_as) == (0, 0)
    assert (copy.shares, copy.same_object_as) == (3, 3)
    assert view_of_copy.shares == 3


def test_sparse_tensors_have_no_strides():
    leaf = observe(torch.eye(2).to_sparse()).leaves[0]
    assert (leaf.layout, leaf.stride, leaf.shares) == (torch.sparse_coo, None, None)


@pytest.mark.parametrize(
    ("eager", "fake", "verdict"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), Verdict.OK),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), Verdict.MISMATCH),
        (torch.zeros(2, 3), torch.zeros(2, 3).double(), Verdict.MISMATCH),
        (torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), Verdict.MISMATCH),
        (torch.zeros(2, 3), torch.zeros(2, 3).requires_grad_(), Verdict.MISMATCH),
        (torch.zeros(2, dtype=torch.cfloat), torch.zeros(2, dtype=torch.cfloat).conj(), Verdict.MISMATCH),
        (torch.zeros(4)[1:], torch.zeros(3), Verdict.MISMATCH),
        (torch.zeros(1, 3), torch.zeros(3, 1).t(), Verdict.IMMATERIAL),
        (torch.zeros(0, 3), torch.zeros(3, 0).t(), Verdict.IMMATERIAL),
        (torch.zeros(2), 2.0, Verdict.MISMATCH),
        ((torch.zeros(2),), (), Verdict.MISMATCH),
    ],
)
def test_verdicts(eager, fake, verdict):
    assert compare(observe(eager), observe(fake)).verdict is verdict


def test_lost_aliasing_is_a_mismatch():
    x = torch.zeros(3)
    outcome = compare(observe(x[:], [x]), observe(x.clone(), [x]))
    assert outcome.verdict is Verdict.MISMATCH
    assert "shares 0 in eager, 1 in fake" in outcome.detail


def test_typed_errors_are_told_from_others():
    func = torch.ops.aten.item.default
    assert of_error(DataDependentOutputException(func)).verdict is Verdict.DATA_DEPENDENT
    assert of_error(UnsupportedOperatorException(func)).verdict is Verdict.UNSUPPORTED
    assert of_error(RuntimeError("first line\nsecond")) == Outcome(Verdict.ERROR, "RuntimeError: first line")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_values_and_identity_and_leaves_no_view(layout):
    t = torch.rand(2, 3, 4, 5, requires_grad=True)
    (a, b, number), _ = relayout((t, t, 3), layout)
    assert a is b
    assert number == 3
    assert a.requires_grad
    assert a.is_leaf
    assert not a._is_view()
    assert torch.equal(a, t if layout != "expanded" else t[:1].expand_as(t))


def test_layouts_are_what_they_are_called():
    t = torch.rand(2, 3, 4, 5)
    assert relayout(t, "column-major")[0].stride() == (1, 2, 6, 24)
    sliced = relayout(t, "sliced")[0]
    assert (sliced.stride(), sliced.storage_offset()) == ((120, 40, 10, 2), 3)
    assert relayout(t, "expanded")[0].stride() == (0, 20, 5, 1)
    assert relayout(t, "channels-last")[0].is_contiguous(memory_format=torch.channels_last)
    assert not relayout(t, "given")[1]
    assert not relayout(torch.tensor([0, 1]), "expanded")[1], "indices must stay valid"


def test_kinds_of_out():
    made = {kind: make_out(kind, (2, 3), torch.float32, torch.device("cpu")) for kind in OUT_KINDS}
    assert {kind: tuple(t.shape) for kind, t in made.items()} == {
        "right": (2, 3), "empty": (0,), "wrong": (2, 3, 2), "odd strides": (2, 3),
    }  # fmt: skip
    assert made["odd strides"].stride() == (2, 4)
    with pytest.raises(ValueError, match="none of"):
        make_out("big", (2,), torch.float32, torch.device("cpu"))


def test_the_same_options_give_the_same_cases():
    options = Options(engine="torch", patterns=("nn.functional.dropout", "sort"), samples=2)
    assert sweep(options).to_json() == sweep(options).to_json()


def test_shards_are_a_partition():
    whole = [id(entry) for _, entry in Options().entries()]
    parts = [id(entry) for i in range(3) for _, entry in Options(shard=(i, 3)).entries()]
    assert sorted(whole) == sorted(parts)
    assert len(whole) > 700


def test_torchs_own_engine_has_findings():
    """The program can fail: these are wrong in torch."""
    tally = sweep(Options(engine="torch", patterns=("linalg.qr", "ormqr"), tables=("out",), samples=2))
    assert tally.count(Verdict.MISMATCH) > 0


def test_the_first_wrong_operator_is_named():
    [entry] = [
        entry for database, entry in names() if database == "op" and entry_name(entry) == "logical_and"
    ]
    found = subjects(
        "op", entry, layouts=["column-major"], tables=["forward"], samples=0, dtypes=[torch.float32]
    )
    said = {first_difference(subject, "torch") for subject in found}
    assert any(text.startswith("aten.logical_and.default((10, 1, 5)") and "stride" in text for text in said)


def test_known_findings_are_only_what_they_say():
    outcome = Outcome(Verdict.MISMATCH, "result 0: stride (5, 1) in eager, (1, 5) in fake; shape (5, 5)")
    assert not is_known(Case("op:fft.fft float32 sample 0", "forward", "given", True, outcome))
    assert not is_known(Case("op:fft.fft float32 sample 0", "backward", "given", False, outcome))
    assert is_known(Case("op:fft.fft float32 sample 0", "backward", "given", True, outcome))
    assert not is_known(Case("module:nn.LSTM float32 sample 0", "forward", "given", False, outcome))
    assert is_known(Case("module:nn.LSTM float32 sample 0", "forward", "given", False, outcome), "cuda")
    copied = Outcome(Verdict.MISMATCH, "result 0: shares 0 in eager, 1 in fake; shape (5,)")
    assert is_known(Case("op:nn.functional.dropout float32 sample 0", "forward", "given", True, copied))
    assert not is_known(Case("op:nn.functional.dropout float32 sample 0", "forward", "given", False, copied))
    assert not is_known(Case("op:add float32 sample 0", "backward", "given", False, outcome))


def test_the_command_prints_writes_and_merges(tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main(["add", "--engine", "rules", "--samples", "1", "--json", str(first)]) == 0
    assert (
        main(["ormqr", "--engine", "torch", "--samples", "1", "--tables", "out", "--json", str(second)]) == 1
    )
    capsys.readouterr()
    assert main(["--merge", str(first), str(second), "--show", "findings"]) == 1
    printed = capsys.readouterr().out
    assert "op:ormqr" in printed
    merged = Tally.read(first)
    merged.merge(Tally.read(second))
    assert merged.count(*Verdict) == sum(
        row[str(v)]
        for path in (first, second)
        for row in json.loads(path.read_text())["counts"]
        for v in Verdict
    )


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="none of torch, rules, fake"):
        make_mode("jax")
