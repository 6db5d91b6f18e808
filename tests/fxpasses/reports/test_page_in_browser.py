"""The page in a real browser: no error, every tab, search, narrow and dark screens, twenty thousand nodes."""

import shutil

import pytest

from fxpasses.reports.page import write_page
from fxpasses.reports.versions import NODE_FIELDS, SCHEMA
from fxpasses.tuning.kept import TuningResult
from fxpasses.tuning.tuning_ledger import Entry

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra 'test'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

BOLD = "<b id='ran'>bold</b><script>window.ran = 1</script>"


def made_up(layers, calls):
    """A chain of calls: an input, then in each layer the same calls, named by number."""
    nodes = [["x", 0, "float32[4, 8]", "[8, 1]", 128, 0, 0, [], -1, -1, 0, ""]]
    modules = []
    for layer in range(layers):
        modules.append([f"h.{layer}", "Block"])
        for _ in range(calls):
            number = len(nodes)
            row = [f"mul_{number}", 1, "float32[4, 8]", "[8, 1]", 128, 32, 0, [number - 1], 0, layer, 0, ""]
            nodes.append(row)
    nodes.append(["output", 2, "", "", 0, 0, 0, [len(nodes) - 1], -1, -1, 0, ""])
    diff = ["--- before", "+++ after", "@@ -1,2 +1,2 @@", "-old: f32[4] = aten.sin.default(x)", "-mul_2: f32[4] = aten.mul.Tensor(old, x)",
            "+mul_2: f32[4] = aten.mul.Tensor(x, x)", BOLD]  # fmt: skip
    run = {"name": "my_pass", "options": BOLD, "graph": "forward", "changed": True, "round": 0, "seconds": 0.1, "check_seconds": 0.1,
           "nodes_before": 3, "nodes_after": 3, "added": [], "removed": [], "modified": [], "matches": 0, "sites": [], "diff": diff,
           "diff_left_out": 0, "contract": {"graphs": ["forward"], "numerics": "bitwise", "requires": []}, "verdict": BOLD}  # fmt: skip
    saved = [["mul_1", 128, "mul", "activation", BOLD]]
    partition = {"memory_budget": 1.0, "saved_bytes": 128, "static_bytes": 0, "bytes_at_full_budget": 128, "bytes_at_zero_budget": None,
                 "recomputed_flops": 0, "saved": saved, "recomputed": [], "curve": [[4000, 0], [3000, 50], [1000, 700]]}  # fmt: skip
    graph = {
        "schema": SCHEMA, "name": "graph_0", "process": "7, now", "node_fields": NODE_FIELDS, "versions": {"torch": "2", "fxpasses": "0"}, "options": BOLD,
        "graphs": {"forward": {"nodes": nodes, "inputs": {"x": "tokens"}}}, "passes": [run], "partition": partition, "regions": None,
        "guards": [{"expression": BOLD, "kind": "", "why": "", "operator": None, "where": None, "avoid": ""}], "symbols": [],
        "ended": {"reason": BOLD, "where": {"file": "/made/up.py", "line": 1, "code": BOLD}},
        "recompiled": {"reason": BOLD, "differs": [BOLD]}, "settings": {"mode": BOLD},
        "kernels": [{"graph": "forward", "key": "fkey", "code": BOLD, "kernels": [["cpp_fused_mul_0:1", ["mul_1"]]]}], "fallbacks": [], "isolated": [],
        "seconds": {"total": 2.0, "stages": {"passes": 1.0, "inductor": 1.0}}, "lines": [["/made/up.py", 1, "forward", BOLD]],
        "modules": modules, "targets": ["placeholder", "aten.mul.Tensor", "output"], "sources": {"/made/up.py": BOLD + "\n"},
    }  # fmt: skip
    entry = Entry("abcdef012345", BOLD, "loses", 1.1, ratio=1.234, low=1.2, high=1.3, changed=4, verdict=BOLD)
    called = ["## Call CompiledFxGraph fkey ##", 2.0, 0.004, 0.001, 0.0]
    events = [[BOLD, 1.0, 0.1, 0.1, 0.0], called, ["cpp_fused_mul_0", 2.0, 0.002, 0.002, 0.0]]
    return {
        "schema": SCHEMA,
        "graphs": [graph],
        "advice": [{"title": BOLD, "why": "", "do": "", "source": ""}],
        "eager": [{"location": BOLD, "reason": BOLD}],
        "steps": {
            "count": 3,
            "compiled": {"seconds": [0.03, 0.01, 0.02], "profiled": [0.9, 0.04, 0.03], "events": events},
            "eager": {"seconds": [0.03] * 3, "events": []},
        },
        "ledger": [
            TuningResult(
                "abcdef012345", (), (entry,), ratio=(0.9, 0.8, 0.95), left=(BOLD,), struck=BOLD
            ).to_data()
        ],
        "simulation": {
            "ranks": 8,
            "mesh": {"dp": 8},
            "best": BOLD,
            "peak_at": BOLD,
            "alive_at_peak": {BOLD: 4},
            "seconds_if": {BOLD: 1.0},
            "settings": [
                {
                    "name": BOLD,
                    "bucket_bytes": 0,
                    "ahead_bytes": 0,
                    "seconds": 0.5,
                    "compute": 0.4,
                    "network": 0.2,
                    "exposed": 0.1,
                    "messages": 2,
                    "peak_bytes": 4,
                }
            ]
            * 2,
            "streams": ["compute", "wait", "dp"],
            "memory": [[0.0, 4], [0.4, 2]],
            "events": [
                [0, BOLD, "forward", 0.0, 0.4, 0],
                [1, BOLD, "backward", 0.4, 0.1, 0],
                [2, BOLD, "backward", 0.3, 0.2, 8],
            ],
        },
    }


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, file, **how):
    page = browser.new_page(**how)
    told = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on(
        "request",
        lambda request: told.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
    )
    page.goto(file.as_uri())
    page.wait_for_selector("main h2")
    return page, told


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_every_tab_opens_without_an_error_and_nothing_of_the_data_runs(chromium, tmp_path, width, scheme):
    file = write_page(made_up(3, 4), tmp_path / "report.html")
    page, told = opened(chromium, file, viewport={"width": width, "height": 800}, color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    texts = {}
    for tab in (
        "Summary",
        "Source",
        "Graphs",
        "Passes",
        "Memory",
        "Sizes",
        "Kernels",
        "Steps",
        "Tuning",
        "Simulation",
    ):
        page.get_by_role("tab", name=tab).click()
        for closed in page.locator("main details:not([open]) > summary").all():
            if closed.is_visible():
                closed.click()
        page.evaluate(
            "new Promise((done) => setTimeout(done, 50))"
        )  # what opens is filled by an event of its own
        texts[tab] = page.inner_text("main")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, tab
    assert all(
        BOLD in texts[tab]
        for tab in (
            "Summary",
            "Source",
            "Passes",
            "Memory",
            "Sizes",
            "Kernels",
            "Steps",
            "Tuning",
            "Simulation",
        )
    )
    assert texts["Simulation"].count("500.0 ms\t400.0 ms\t200.0 ms\t100.0 ms\t2\t4 B") == 1
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 60)
    assert f"{BOLD} (backward): 200.0 ms from 300.0 ms on, 8 B" in page.inner_text("main")
    assert "loses\t1.10\t1.23\t1.20 to 1.30\t\t4" in texts["Tuning"]
    assert "graph_0 forward\t2\t4.0 ms\t10.0 %" in texts["Steps"]
    assert "cpp_fused_mul_0\t2\t2.0 ms\t5.0 %\tmul_1" in texts["Steps"]
    assert "1.50\ntimes as fast" in texts["Steps"]
    assert "h.0 to 2 x 3: 4 nodes each" in texts["Graphs"]
    assert page.evaluate("window.ran") is None
    assert page.locator("#ran").count() == 0
    assert told == []


def test_the_address_names_what_is_shown(chromium, tmp_path):
    data = made_up(2, 4)
    data["graphs"].append({**data["graphs"][0], "name": "graph_1", "process": "8, today"})
    file = write_page(data, tmp_path / "report.html")
    page, told = opened(chromium, file)
    page.get_by_role("tab", name="Passes").click()
    page.keyboard.press("ArrowRight")
    chosen = page.locator('[aria-selected="true"]')
    assert chosen.inner_text() == "Memory"
    page.go_back()
    assert chosen.inner_text() == "Passes"
    page.reload()
    assert chosen.inner_text() == "Passes"
    page.goto(f"{file.as_uri()}#tab=Graphs&graph=graph_1&search=mul_2")
    page.reload()
    assert page.locator("#graph").input_value() == "1"
    assert "2 nodes match" in page.inner_text("main")
    page.locator("main td a", has_text="mul_2").first.click()
    assert "forward graph of graph_0" in page.inner_text("aside")
    assert page.locator("#graph").input_value() == "0"
    page.goto(f"{file.as_uri()}#tab=Graphs&search=block")
    page.reload()
    assert "16 nodes match" in page.inner_text("main")
    page.goto(f"{file.as_uri()}#tab=Graphs&search=conv")
    page.reload()
    assert "No graph of this report has such a node" in page.inner_text("main")
    page.goto(f"{file.as_uri()}#tab=<b>&graph=constructor&search=%3Cscript%3E")
    page.reload()
    assert chosen.inner_text() == "Summary"
    assert page.locator("#search").input_value() == "<script>"
    assert told == []


def test_two_reports_and_the_memory_budget(chromium, tmp_path):
    data = made_up(3, 4)
    data["graphs"].append({**data["graphs"][0], "name": "graph_1", "process": "8, today"})
    rows = {"Nodes": [["forward", 10, 14]], "Guards": [[BOLD, None, 1]]}
    data["against"] = {"schema": SCHEMA, "directory": BOLD, "graphs": [{"name": "graph_0", "groups": rows}], "only_before": ["graph_1"],
                       "only_after": []}  # fmt: skip
    page, told = opened(chromium, write_page(data, tmp_path / "report.html"))
    text = page.inner_text("main")
    assert BOLD in text
    assert "x 1.40" in text
    assert "only before: graph_1" in text
    page.get_by_role("tab", name="Memory").click()
    assert "would save 4.0 kB, as it does now" in page.inner_text("main")
    page.get_by_label("memory budget").fill("0.5")
    assert "would save 1.0 kB, and compute 700 FLOPs" in page.inner_text("main")
    page.get_by_role("tab", name="Source").click()
    assert "graph break" in page.inner_text("main")
    page.get_by_role("tab", name="Summary").click()
    assert "graphs of several processes" in page.inner_text("main")
    assert page.evaluate("window.ran") is None
    assert told == []


def test_a_node_is_found_followed_and_drawn(chromium, tmp_path):
    page, told = opened(chromium, write_page(made_up(3, 4), tmp_path / "report.html"))
    page.fill("#search", "mul_7")
    page.wait_for_selector("text=1 node matches")
    page.locator("main td a").first.click()
    assert "mul_7: float32[4, 8] = aten.mul.Tensor" in page.inner_text("aside")
    page.locator("aside a", has_text="draw").click()
    assert page.locator("svg.graph g").count() == 5
    page.locator("aside a", has_text="up.py:1").click()
    assert "up.py" in page.inner_text("main")
    assert page.locator("tr.at").count() == 1
    assert told == []


def test_twenty_thousand_nodes_are_rendered_on_demand(chromium, tmp_path):
    file = write_page(made_up(400, 50), tmp_path / "report.html")
    assert file.stat().st_size < 5e6
    page, told = opened(chromium, file)
    page.get_by_role("tab", name="Graphs").click()
    assert page.evaluate("document.getElementsByTagName('*').length") < 1000
    page.fill("#search", "mul")
    page.wait_for_selector("text=20,000 nodes match")
    assert page.locator("main tr").count() == 202
    assert told == []


def test_a_diff_is_drawn_and_a_gradient_next_to_its_value(chromium, tmp_path):
    data = made_up(3, 4)
    graph = data["graphs"][0]
    backward = [["tangents_1", 0, "float32[4, 8]", "[8, 1]", 128, 0, 0, [], -1, -1, 1, ""]]
    backward.append(["grad", 1, "float32[4, 8]", "[8, 1]", 128, 32, 0, [0], 0, 0, 1, "mul_7"])
    graph["graphs"]["backward"] = {"nodes": backward, "inputs": {}}
    page, told = opened(chromium, write_page(data, tmp_path / "report.html"))
    page.get_by_role("tab", name="Passes").click()
    page.locator("main summary", has_text="my_pass").click()
    page.wait_for_selector("svg.graph")
    assert page.locator("svg.graph rect.remove").count() == 1
    assert page.locator("svg.graph rect.changed").count() == 1
    assert page.locator("svg.graph path.remove").count() == 2
    page.fill("#search", "mul_7")
    page.wait_for_selector("text=1 node matches")
    page.locator("main td a", has_text="grad").click()
    page.locator("aside a", has_text="draw").click()
    assert page.locator(".pair svg.graph").count() == 2
    assert "the value, in the forward graph" in page.inner_text("main")
    assert told == []
