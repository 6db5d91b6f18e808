"""The data of a compilation and the page that is made of it."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.commands.main import main
from fxpasses.errors import ReportError
from fxpasses.reports.advice import advice
from fxpasses.reports.against import compare
from fxpasses.reports.page import read_report
from fxpasses.reports.record import Recorder, parameter_name
from fxpasses.reports.step_times import measure_steps
from fxpasses.reports.summary import Summary
from fxpasses.reports.versions import NODE_FIELDS, SCHEMA

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "pages" / "report.md").read_text()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.c_proj(
            torch.nn.functional.gelu(self.c_fc(x) * torch.ones(()))
        )  # </script><img src=x>


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


def compiled_with_report(directory, **options):
    torch._dynamo.reset()
    settings = {"report": str(directory), "compiler": "eager", "regions": "off", **options}
    compiled = torch.compile(Model(), backend="fxpasses", options=settings)
    compiled(torch.randn(3, 8)).sum().backward()
    return compiled


@pytest.fixture
def recorded(tmp_path):
    compiled = compiled_with_report(tmp_path)
    (graph,) = read_report(tmp_path)["graphs"]
    return compiled, graph


def rows(graph, kind):
    return [dict(zip(NODE_FIELDS, row, strict=True)) for row in graph["graphs"][kind]["nodes"]]


def test_nodes_know_their_parameters_lines_modules_and_forward_nodes(recorded):
    _, graph = recorded
    inputs = graph["graphs"]["forward"]["inputs"]
    assert {"h.0.c_fc.weight", "h.0.c_fc.bias", "h.1.c_proj.weight", "x"} <= set(inputs.values())
    forward, backward = rows(graph, "forward"), rows(graph, "backward")
    by_name = {row["name"]: row for row in forward}
    matmuls = [row for row in forward if graph["targets"][row["target"]] == "aten.addmm.default"]
    assert [graph["modules"][row["module"]][0] for row in matmuls] == [
        "h.0.c_fc",
        "h.0.c_proj",
        "h.1.c_fc",
        "h.1.c_proj",
    ]
    for row in matmuls:
        file, line, function, code = graph["lines"][row["line"]]
        assert (file, function) == (__file__, "forward")
        assert Path(__file__).read_text().splitlines()[line - 1].strip() == code
        assert row["flops"] > 0
        assert [graph["graphs"]["forward"]["nodes"][i][0] for i in row["inputs"]][1] in by_name
    paired = [row["forward_node"] for row in backward if graph["targets"][row["target"]] == "aten.mm.default"]
    assert set(paired) == {row["name"] for row in matmuls}
    assert graph["sources"][__file__] == Path(__file__).read_text()


def test_passes_have_diffs_and_the_partition_says_what_is_saved(recorded):
    _, graph = recorded
    changed = [run for run in graph["passes"] if run["changed"]]
    assert changed
    assert all(any(line.startswith(("+", "-")) for line in run["diff"][2:]) for run in changed)
    saved = {name: size for name, size, *_ in graph["partition"]["saved"]}
    sizes = {row["name"]: row["bytes"] for row in rows(graph, "forward")}
    assert saved
    assert all(sizes[name] == size for name, size in saved.items() if size)
    assert graph["seconds"]["stages"]["tracing"] > 0


def test_symbols_and_guards_are_recorded(tmp_path):
    torch._dynamo.reset()

    def function(x):
        return x.view(2, -1).sin() if x.shape[0] % 2 == 0 else x

    options = {"report": str(tmp_path), "compiler": "eager"}
    torch.compile(function, backend="fxpasses", dynamic=True, options=options)(torch.randn(6, 5))
    (graph,) = read_report(tmp_path)["graphs"]
    assert {symbol["hint"] for symbol in graph["symbols"]} == {"6", "5"}
    assert any("% 2 == 0" in guard["expression"] for guard in graph["guards"])


def test_graph_breaks_and_recompiles_are_told_with_their_reason(tmp_path):
    torch._dynamo.reset()

    def function(x):
        y = x.sin()
        if y.sum() > 0:
            y = y + 1
        return y.cos()

    options = {"report": str(tmp_path), "compiler": "eager"}
    compiled = torch.compile(function, backend="fxpasses", options=options)
    for size in (4, 5):
        compiled(torch.ones(size))
    first, rest, again, rest_again = read_report(tmp_path)["graphs"]
    line = function.__code__.co_firstlineno + 2
    for graph in (first, again):
        assert "generic_jump" in graph["ended"]["reason"]
        assert graph["ended"]["where"] == {"file": __file__, "line": line, "code": "if y.sum() > 0:"}
    assert rest["ended"] is rest_again["ended"] is first["recompiled"] is rest["recompiled"] is None
    assert "size mismatch at index 0. expected 4, actual 5" in again["recompiled"]["reason"]
    assert "shape of input x, dimension 0: 4 -> 5" in again["recompiled"]["differs"]
    titles = [item["title"] for item in read_report(tmp_path)["advice"]]
    assert "The graph ends here: a branch depends on the value of a tensor" in titles
    assert [item["source"] for item in advice([first])] == [f"{__file__}:{line}"]


def test_runs_have_their_contract_and_the_verdict_of_the_value_check(tmp_path):
    compiled_with_report(tmp_path, check="values")
    (graph,) = read_report(tmp_path)["graphs"]
    assert any(run["changed"] for run in graph["passes"])
    for run in graph["passes"]:
        assert run["verdict"] == ("the same values" if run["changed"] else "")
        assert run["contract"]["numerics"] in ("bitwise", "tolerance")
        assert run["graph"] in run["contract"]["graphs"]


def test_a_wrong_pass_is_named_in_the_report(tmp_path):
    @fxpasses.graph_pass(graphs=["joint", "inference"])
    def doubles(gm):
        "Wrong on purpose."
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        node.target = torch.ops.aten.cos.default
        return True

    torch._dynamo.reset()
    options = {"report": str(tmp_path), "compiler": "eager", "check": "values", "passes": [doubles]}
    with pytest.raises(fxpasses.ValueMismatchError):
        torch.compile(lambda x: x.sin() + 1, backend="fxpasses", options=options)(torch.ones(3))
    (graph,) = read_report(tmp_path)["graphs"]
    (run,) = (run for run in graph["passes"] if run["name"] == "doubles")
    assert run["verdict"].startswith("wrong: ")


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_pass_that_raises_is_told(tmp_path, on_failure):
    @fxpasses.graph_pass(graphs=["joint", "inference"])
    def gives_up(gm):
        "Raises."
        raise ValueError("on purpose")

    torch._dynamo.reset()
    options = {"report": str(tmp_path), "compiler": "eager", "on_failure": on_failure, "passes": [gives_up]}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="fxpasses", options=options)
    with pytest.raises(Exception, match="on purpose") if on_failure == "raise" else nullcontext():
        torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
    data = read_report(tmp_path)
    (graph,) = data["graphs"]
    (failed,) = graph["fallbacks"]
    assert "on purpose" in failed["reason"]
    told = "the call raised an error" if on_failure == "raise" else "this graph runs in eager"
    assert told in data["advice"][0]["title"]
    assert "on purpose" in fxpasses.report(compiled).read_text()


def test_the_stages_of_an_inference_graph_have_its_tracing(tmp_path):
    torch._dynamo.reset()
    compiled = fxpasses.compile(Model(), report=tmp_path, compiler="eager", cache="off")
    with torch.no_grad():
        compiled(torch.randn(3, 8))
    (graph,) = compiled.graphs
    assert graph["seconds"]["stages"]["tracing"] > 0


def test_what_torch_compile_made_of_a_function_or_in_place_has_its_report(tmp_path):
    torch._dynamo.reset()
    options = {"report": str(tmp_path / "function"), "compiler": "eager"}
    function = torch.compile(lambda x: x.sin(), backend="fxpasses", options=options)
    function(torch.ones(3))
    assert fxpasses.report(function).parent == tmp_path / "function"
    model = Model()
    model.compile(backend="fxpasses", options=options | {"report": str(tmp_path / "model")})
    model(torch.ones(3, 8))
    assert fxpasses.report(model).parent == tmp_path / "model"


def test_a_long_line_is_kept_once(tmp_path):
    torch._dynamo.reset()
    file, scope = tmp_path / "long.py", {}
    file.write_text(f"def function(x):\n    return x{' + x.sin()' * 200}\n")
    exec(compile(file.read_text(), str(file), "exec"), scope)
    options = {"report": str(tmp_path / "report"), "compiler": "eager", "regions": "off"}
    torch.compile(scope["function"], backend="fxpasses", options=options)(torch.ones(3))
    (graph,) = read_report(tmp_path / "report")["graphs"]
    assert max(len(line[3]) for line in graph["lines"]) < 400


def test_the_curve_is_that_of_the_partition(tmp_path):
    partitions = []
    for budget in (1.0, 0.5, 0.0):
        compiled_with_report(tmp_path / str(budget), memory_budget=budget)
        (graph,) = read_report(tmp_path / str(budget))["graphs"]
        partitions.append(graph["partition"])
    full, half, zero = partitions
    curve = full["curve"]
    assert len(curve) > 2
    assert curve == half["curve"] == zero["curve"]
    assert curve[0] == [full["saved_bytes"], 0]
    assert curve[-1][0] == zero["saved_bytes"] == half["bytes_at_zero_budget"]
    assert curve == sorted(curve, key=lambda point: (-point[0], point[1]))
    assert curve[-1][1] <= zero["recomputed_flops"]


def test_two_reports_are_compared(tmp_path, capsys):
    compiled = compiled_with_report(tmp_path / "a")
    compiled_with_report(tmp_path / "b", memory_budget=0.0)
    data = read_report(tmp_path / "b", tmp_path / "a")
    (graph,) = data["against"]["graphs"]
    groups = graph["groups"]
    assert ["memory_budget", "None", "0.0"] in groups["Versions and options"]
    sums = {what: (before, now) for what, before, now in groups["Bytes and FLOPs"]}
    before, now = sums["bytes saved for the backward pass"]
    assert before == read_report(tmp_path / "a")["graphs"][0]["partition"]["saved_bytes"] > now
    assert sums["FLOPs computed again"][1] > sums["FLOPs computed again"][0]
    assert "Operators, backward" in groups
    assert not {"Guards", "In eager", "Sites rewritten by passes"} & set(groups)
    same = compare(data, data)
    assert [one["groups"] for one in same["graphs"]] == [{}]
    assert same["only_before"] == same["only_after"] == []
    assert main(["report", str(tmp_path / "b"), "--against", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == data["against"]["graphs"]
    assert main(["report", str(tmp_path / "b"), "--against", str(tmp_path / "nowhere")]) == 2
    assert '"against":{' in fxpasses.report(compiled, against=tmp_path / "b").read_text()


def test_what_regions_save_is_told_of_their_own_lines(tmp_path):
    torch._dynamo.reset()
    model = nn.Sequential(*[Block() for _ in range(4)])
    options = {"report": str(tmp_path), "compiler": "eager", "regions": "always"}
    torch.compile(model, backend="fxpasses", options=options)(torch.randn(4000, 8)).sum().backward()
    whole, region = read_report(tmp_path)["graphs"]
    assert region["name"] == "graph_0/regions/graph_0"
    (item,) = (item for item in advice([whole, region]) if "are saved for one line" in item["title"])
    assert "gelu" in item["why"]


@pytest.mark.slow
def test_inductors_kernels_name_their_nodes(tmp_path):
    compiled_with_report(tmp_path, compiler="inductor", regions="always")
    graphs = read_report(tmp_path)["graphs"]
    assert [[found["graph"] for found in graph["kernels"]] for graph in graphs][1] == ["forward", "backward"]
    every = [(graph, found) for graph in graphs for found in graph["kernels"]]
    assert len({found["key"] for _, found in every}) == len(every)
    assert all(found["kernels"] for _, found in every)  # of the segments between calls of regions as well
    for graph, found in every:
        names = {row["name"] for row in rows(graph, found["graph"])}
        for kernel, nodes in found["kernels"]:
            assert kernel.partition(":")[0] in found["code"]
            assert nodes or kernel.startswith("extern_kernels")  # a call that Inductor's own passes made
            assert set(nodes) <= names
    compiled_with_report(tmp_path / "again", compiler="inductor", regions="always")  # from caches by now
    again = read_report(tmp_path / "again")["graphs"]
    assert all(found["from_cache"] for graph in again for found in graph["kernels"])
    assert [[found["kernels"] for found in graph["kernels"]] for graph in again] == [
        [found["kernels"] for found in graph["kernels"]] for graph in graphs
    ]


def test_steps_are_measured_compiled_and_in_eager(tmp_path):
    compiled = compiled_with_report(tmp_path)
    calls = []

    def step():
        calls.append(torch.compiler.is_compiling())
        compiled(torch.randn(3, 8)).sum().backward()

    measure_steps(step, tmp_path, count=2)
    found = read_report(tmp_path)["steps"]
    assert len(calls) == 2 * (2 * 2 + 3)
    assert [len(found[way]["seconds"]) for way in ("compiled", "eager")] == [2, 2]
    names = {way: {event[0] for event in found[way]["events"]} for way in ("compiled", "eager")}
    assert "CompiledFunction" in names["compiled"] - names["eager"]
    assert [len(found[way]["profiled"]) for way in ("compiled", "eager")] == [2, 2]
    assert json.loads((tmp_path / "steps_eager.trace.json").read_text())["traceEvents"]
    assert '"steps":{' in fxpasses.report(compiled).read_text()


def test_one_interrupted_step_is_no_time_of_a_step(tmp_path):
    compiled = compiled_with_report(tmp_path)
    steps = []

    def step():
        steps.append(None)
        if (
            len(steps) == 14
        ):  # the third that is profiled compiled: after 2 * 5 that are timed, and one to warm up
            torch.ones(1).fill_(3.0)
        torch.ones(1).sin()

    measure_steps(step, tmp_path, count=3)
    names = {event[0]: event[1] for event in read_report(tmp_path)["steps"]["compiled"]["events"]}
    assert names["aten::sin"] == 1
    assert "aten::fill_" not in names or names["aten::fill_"] == 1  # of torch.ones
    assert fxpasses.report(compiled)


def test_a_function_that_dynamo_leaves_in_eager_is_told(tmp_path):
    torch._dynamo.reset()

    def left(x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x.sin()
        return x

    options = {"report": str(tmp_path), "compiler": "eager"}
    compiled = torch.compile(left, backend="fxpasses", options=options)
    compiled(torch.ones(2))
    with pytest.raises(ReportError, match="Dynamo left all of it in eager"):
        fxpasses.report(compiled)
    compiled_with_report(tmp_path)
    data = read_report(tmp_path)
    (one,) = data["eager"]
    assert one["location"].endswith(", left")
    assert data["advice"][0]["title"] == "left is not compiled: it runs in eager, except for what it calls"


def test_of_a_shape_the_dimension_that_differs_is_told(tmp_path):
    torch._dynamo.reset()
    options = {"report": str(tmp_path), "compiler": "eager"}
    compiled = torch.compile(lambda x: x.sin(), backend="fxpasses", options=options)
    for size in (2, 5):
        compiled(torch.ones(3, size))
    assert read_report(tmp_path)["graphs"][1]["recompiled"]["differs"] == [
        "shape of input x, dimension 1: 2 -> 5"
    ]


def test_a_recompile_for_another_reason_than_sizes_is_not_blamed_on_them(tmp_path):
    torch._dynamo.reset()
    options = {"report": str(tmp_path), "compiler": "eager"}
    compiled = torch.compile(lambda **more: more["x"].sin() + len(more), backend="fxpasses", options=options)
    compiled(x=torch.ones(3, 2))
    compiled(x=torch.ones(4, 2), y=1)
    data = read_report(tmp_path)
    again = data["graphs"][1]["recompiled"]
    assert "len(more)" in again["reason"]
    assert "stack trace" not in again["reason"]
    assert again["differs"] == []
    (told,) = (item for item in data["advice"] if item["title"].startswith("Compiled again"))
    assert "mark_dynamic" not in str(told)
    assert "what the guard reads" in str(told)


def test_advice_on_recompiles_and_sizes_fits_their_cause(tmp_path):
    torch._dynamo.reset()
    options = {"report": str(tmp_path), "compiler": "eager"}
    compiled = torch.compile(lambda x: x.sin(), backend="fxpasses", options=options)
    compiled(torch.ones(3))
    compiled(torch.ones(3, dtype=torch.float64))
    data = read_report(tmp_path)
    (told,) = (item for item in data["advice"] if item["title"].startswith("Compiled again"))
    assert "dtype mismatch" in told["title"]
    assert "mark_dynamic" not in told["do"]
    assert "dtype" in Summary(data).rows[1][-1]
    guard = {"expression": "s0 == 1", "why": "", "where": {"file": "f", "line": 1}}
    advised = {**data["graphs"][1], "guards": [{**guard, "avoid": "nothing to avoid if it never changes"}]}
    assert advice([advised])[0]["title"].startswith("Compiled again")
    ended = {"reason": "Call failed\n  Explanation: long\n  Hint: Do that.\n", "where": None}
    (first, *_) = advice([{**data["graphs"][0], "ended": ended}])
    assert (first["title"], first["do"]) == ("The graph ends here: Call failed", "Do that.")


def test_every_field_is_documented(recorded):
    _, graph = recorded
    fields = {
        *graph,
        *NODE_FIELDS,
        *compare({"graphs": []}, {"graphs": []}),
        *graph["partition"],
        *graph["passes"][0],
        *graph["seconds"],
    }
    assert [field for field in sorted(fields) if f"`{field}`" not in DOCUMENTED] == []
    assert f"version {SCHEMA}" in DOCUMENTED


def test_nothing_of_the_users_code_is_markup(recorded, tmp_path):
    compiled, _ = recorded
    page = fxpasses.report(compiled).read_text()
    assert "</script><img" not in page
    assert page.count("<script") == page.count("</script>") == 6
    assert "default-src 'none'" in page
    body = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    data = json.loads(body)
    assert "</script><img src=x>" in data["sources"][__file__]
    without_data = page.replace(body, "")
    assert re.findall(r"(?:src|href)=[\"']?https?:", without_data) == []


def test_a_report_is_asked_for_by_directory_or_by_what_was_compiled(tmp_path):
    compiled = compiled_with_report(tmp_path / "here")
    assert fxpasses.report(compiled) == tmp_path / "here" / "report.html"
    assert fxpasses.report(tmp_path / "here", tmp_path / "other.html") == tmp_path / "other.html"

    @torch.compile(backend="fxpasses", options={"report": str(tmp_path / "function"), "compiler": "eager"})
    def function(x):
        return x.sin()

    function(torch.ones(3))
    assert fxpasses.report(function) == tmp_path / "function" / "report.html"


def test_what_is_no_report_is_an_error_that_says_why(tmp_path, capsys):
    plain = torch.compile(nn.Linear(2, 2), backend="fxpasses")
    with pytest.raises(fxpasses.ReportError, match="compiled without a report"):
        fxpasses.report(plain)
    with pytest.raises(fxpasses.ReportError, match="Linear was not made by"):
        fxpasses.report(nn.Linear(2, 2))
    with pytest.raises(fxpasses.ReportError, match=r"expected a function that does one step, .* got True"):
        fxpasses.report(tmp_path, profile=True)
    with pytest.raises(fxpasses.ReportError, match="there is no directory"):
        fxpasses.report(tmp_path / "nowhere")
    with pytest.raises(fxpasses.ReportError, match="there is no report in"):
        fxpasses.report(tmp_path)
    (tmp_path / "graph_0").mkdir()
    (tmp_path / "graph_0" / "graph.json").write_text(json.dumps({"schema": 99}))
    assert main(["report", str(tmp_path)]) == 2
    assert "has version 99 of the data; this fxpasses reads 1" in capsys.readouterr().err
    (tmp_path / "graph_0" / "graph.json").write_text('{"schema": 1,')
    assert main(["report", str(tmp_path)]) == 2
    assert "is no JSON" in capsys.readouterr().err
    (tmp_path / "graph_0" / "graph.json").write_text('{"schema": 1}')
    assert main(["report", str(tmp_path)]) == 2
    assert "not as fxpasses writes it: KeyError" in capsys.readouterr().err


def test_the_command(recorded, tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == SCHEMA
    (tmp_path / "ledger.json").write_text('[{"high": Infinity}]')  # browsers do not read that
    assert read_report(tmp_path)["ledger"] == [{"high": None}]


def test_what_dynamo_calls_an_input():
    assert parameter_name("L['self']._modules['h']._modules['0']._buffers['mask']") == "h.0.mask"
    assert parameter_name("L['batch']['tokens']") == "batch['tokens']"
    assert parameter_name("") == ""
    assert Recorder()._input_name(torch.fx.Graph().placeholder("tangents_1")) == ""


def test_code_of_a_graph_that_calls_modules_and_methods():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Flatten())).graph
    with graph.inserting_before(graph.output_node()):
        graph.call_method("relu", tuple(graph.output_node().args))
    text = fxpasses.annotated_code(torch.fx.GraphModule(nn.Sequential(nn.Linear(2, 2), nn.Flatten()), graph))
    assert "= self.0(" in text
    assert "= relu(" in text
