"""What results look like in a notebook: tables, with all text escaped; and reports asked of what fxpasses.compile gives."""

import html.parser
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fake
import fxpasses
from fake.library.opcheck.result import CheckFailure, Verdict
from fxpasses.checking.model import ModelCheck, StageCheck
from fxpasses.compiling.history import Difference, Miss
from fxpasses.passes import EliminateDeadCode
from fxpasses.reports.page import read_report
from fxpasses.testing.proof import PassProof, SiteProof

BOLD = "<b>bold</b>"


class Cells(html.parser.HTMLParser):
    """The tags and the texts of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        self.texts.append(data)


def shown(result):
    cells = Cells(result._repr_html_())
    assert cells.tags <= {"p", "table", "tr", "th", "td", "details", "summary", "pre"}
    return cells.texts


def test_text_of_results_is_escaped():
    check = ModelCheck((StageCheck(BOLD, 0.5, 2.0, BOLD, (BOLD,)),), (BOLD,))
    assert {BOLD, "WRONG"} <= set(shown(check))
    assert BOLD in shown(Miss((Difference("option mode", BOLD, "b"),)))
    assert BOLD in shown(PassProof(BOLD, (SiteProof("joint", None, None, SimpleNamespace(kind=BOLD)),)))
    failed = Verdict(
        "op", {"schema": CheckFailure(op="op", check="schema", problem=BOLD, evidence=(), fix=BOLD)}
    )
    assert shown(failed).count(BOLD) == 2


def test_captures_runs_explanations_and_region_reports():
    def function(x):
        return (x @ x).sin()

    captured = fxpasses.capture(function, torch.randn(4, 4, requires_grad=True))
    texts = shown(captured)
    assert {"forward", "backward", "joint"} <= set(texts)
    assert any("aten.mm.default" in text and "sin" in text for text in texts)
    assert {"64 bytes", "saved"} <= set(shown(captured.partition))
    gm = captured.forward
    node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[0]
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.ops.aten.exp.default, (node,)).meta.update(node.meta)
    (run,) = runs = fxpasses.PassManager([EliminateDeadCode()]).run(gm, "forward")
    assert "exp" in "".join(shown(run))
    assert {"eliminate_dead_code", "1 of 1 runs changed the graph"} <= set(shown(runs))
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    mode.from_tensor(torch.zeros(6, 5), name="x", dims={0: "dynamic"}).view(-1, 3, 5)
    assert "x.size(0) % 3 == 0" in shown(fake.explain(mode.shape_env))
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])
    report = fxpasses.regions(fxpasses.capture(blocks, torch.randn(2, 4)).forward)
    assert "4" in shown(report)


def test_what_compile_gives_tells_of_itself(tmp_path):
    torch._dynamo.reset()
    compiled = fxpasses.compile(nn.Linear(3, 3), compiler="eager", report=tmp_path)
    compiled(torch.randn(2, 3)).sum().backward()
    (graph,) = compiled.graphs
    elsewhere = tmp_path / "graph_7"  # what another process has left
    elsewhere.mkdir()
    (elsewhere / "graph.json").write_text(json.dumps({**graph, "process": "1, 2026-01-01 00:00:00"}))
    assert [one["name"] for one in compiled.graphs] == ["graph_0"]
    assert len(read_report(tmp_path)["graphs"]) == 2
    assert set(graph["graphs"]) == {"joint", "forward", "backward"}
    summary = compiled.explain()
    assert str(summary).startswith("graph 0; nodes forward ")
    assert "graph" in shown(summary)
    assert set(shown(summary)) < set(shown(compiled))
    assert "graphs" in shown(fxpasses.stats())
    assert compiled.report() == fxpasses.report(compiled) == tmp_path / "report.html"
    without = fxpasses.compile(nn.Linear(3, 3), compiler="eager")
    assert "Linear, compiled by fxpasses" in shown(without)[0]
    for ask in (without.explain, without.report, lambda: without.graphs):
        with pytest.raises(fxpasses.ReportError, match="without a report"):
            ask()
