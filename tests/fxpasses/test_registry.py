"""Passes of several libraries side by side, and passes written as text."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

import fxpasses
from fxpasses import ContractError, Options, OptionsError, Pass, graph_pass, use_passes
from fxpasses.pass_manager.specification import parse_pass, split_pipeline
from fxpasses.passes import EliminateDeadCode, FoldConstants, registry

X = torch.ones(2)


@dataclass(frozen=True)
class Tuned(Pass):
    "A pass with an option of each kind."

    name: ClassVar[str] = "tuned"
    count: int = 1
    rate: float = 0.5
    strict: bool = False
    label: str = "none"
    mode: Literal["fast", "safe"] = "fast"
    sizes: tuple[int, ...] = ()
    limit: int | None = None

    def apply(self, gm):
        return False


AVAILABLE = {"tuned": Tuned, "eliminate_dead_code": EliminateDeadCode}


def names(**options):
    return [item.name for item in Options.parse(options).passes]


# --- text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tuned", Tuned()),
        ("tuned{}", Tuned()),
        ("tuned{count=3}", Tuned(count=3)),
        ("tuned{count=3 rate=2}", Tuned(count=3, rate=2.0)),
        ("tuned{count=3, rate=1e-3}", Tuned(count=3, rate=1e-3)),
        ("tuned{strict}", Tuned(strict=True)),
        ("tuned{strict=false label='a b'}", Tuned(label="a b")),
        ("tuned{label=3}", Tuned(label="3")),
        ("tuned{mode=safe limit=None}", Tuned(mode="safe")),
        ("tuned{sizes=(1,2) limit=4}", Tuned(sizes=(1, 2), limit=4)),
    ],
)
def test_passes_as_text(text, expected):
    parsed = parse_pass(text, AVAILABLE)
    assert parsed == expected
    assert type(parsed.rate) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tunde", "did you mean 'tuned'"),
        ("tuned{cuont=3}", "did you mean 'count'"),
        ("tuned{count=many}", "type int, got 'many'"),
        ("tuned{count=true}", "type int"),
        ("tuned{mode=slow}", "Literal"),
        ("tuned{count=3", "name{option=value"),
        ("", "name{option=value"),
    ],
)
def test_text_that_is_wrong(text, message):
    with pytest.raises(OptionsError, match=message):
        parse_pass(text, AVAILABLE)


def test_a_pass_prints_as_text_that_is_read_again():
    item = Tuned(count=3, label="a b", sizes=(1, 2))
    assert str(item) == "tuned{count=3 label='a b' sizes=(1, 2)}"
    assert parse_pass(str(item), AVAILABLE) == item
    assert str(Tuned()) == "tuned"


def test_pipelines_as_text():
    assert split_pipeline("tuned{count=1, rate=2}, eliminate_dead_code") == [
        "tuned{count=1, rate=2}",
        "eliminate_dead_code",
    ]


def test_the_backend_takes_options_in_names():
    assert Options.parse({"passes": ["fold_constants{max_bytes=16}"]}).passes == (
        FoldConstants(max_bytes=16),
    )


# --- scopes


def nothing(name):
    return graph_pass(lambda gm: False, name=name, graphs="any")


def test_passes_are_added_inside_the_block_alone():
    mine = nothing("mylib::mine")
    with use_passes(mine, "tuned" if "tuned" in fxpasses.available_passes() else EliminateDeadCode()):
        assert names(passes=[]) == ["mylib::mine", "eliminate_dead_code"]
        assert names(passes=["eliminate_dead_code"]) == ["eliminate_dead_code", "mylib::mine"]
        assert "mylib::mine" in fxpasses.available_passes()
        assert names(passes=["mylib::mine", "remove_no_ops"])[:2] == ["mylib::mine", "remove_no_ops"]
    assert names(passes=[]) == []
    assert "mylib::mine" not in fxpasses.available_passes()


def test_blocks_of_two_libraries_nest():
    with use_passes(nothing("one::a")), use_passes(nothing("two::a")):
        assert names(passes=[]) == ["one::a", "two::a"]


def test_a_library_cannot_take_the_name_of_another():
    with use_passes(nothing("shared"), owner="one"):
        with pytest.raises(ContractError, match=r"one brought .* and two brings") as caught:
            with use_passes(nothing("shared"), owner="two"):
                pytest.fail("not reached")
        assert caught.value.passes == ("shared", "shared")
        assert names(passes=[]) == ["shared"]


def test_the_same_pass_twice_runs_once():
    with use_passes(EliminateDeadCode()), use_passes(EliminateDeadCode()):
        assert names(passes=[]) == ["eliminate_dead_code"]


def test_scopes_reach_compilation_and_capture():
    seen = []

    @graph_pass(graphs=["inference"])
    def looks(gm):
        seen.append(len(gm.graph.nodes))
        return False

    with torch.no_grad(), use_passes(looks):
        torch.compile(lambda x: x.sin(), backend="fxpasses", options={"compiler": "eager"})(X)
        fxpasses.capture(lambda x: x.sin(), X)
    assert len(seen) == 2


@pytest.mark.parametrize("wrong", [EliminateDeadCode, print, 3])
def test_only_passes_can_be_used(wrong):
    with pytest.raises(OptionsError, match="use_passes"), use_passes(wrong):
        pytest.fail("not reached")


# --- entry points


class Distribution:
    def __init__(self, name):
        self.name = name


def point(name, value, owner):
    made = importlib.metadata.EntryPoint(name=name, value=value, group=registry.ENTRY_POINTS)
    vars(made)["dist"] = Distribution(owner)
    return made


def installed(monkeypatch, *points):
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [p for p in points if p.group == group]
    )


def test_installed_libraries_are_asked_by_name(monkeypatch):
    installed(
        monkeypatch,
        point("tuned", f"{__name__}:Tuned", "my-lib"),
        point("broken", "nowhere:Nothing", "other"),
    )
    assert "my_lib::tuned" in fxpasses.available_passes()
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: Tuned)
    assert Options.parse({"passes": ["my_lib::tuned{count=2}"]}).passes == (Tuned(count=2),)


def test_two_libraries_that_list_the_same_name(monkeypatch):
    installed(monkeypatch, point("ns::fuse", "one:Fuse", "one"), point("ns::fuse", "two:Fuse", "two"))
    with pytest.raises(ContractError, match=r"'ns::fuse': one \(one:Fuse\) and two \(two:Fuse\)"):
        fxpasses.available_passes()


def test_an_entry_point_that_is_no_pass(monkeypatch):
    installed(monkeypatch, point("join", "os.path:join", "mylib"))
    with pytest.raises(OptionsError, match="neither a pass nor a class of passes"):
        Options.parse({"passes": ["mylib::join"]})
