"""Wrong arguments of what users call with passes: a typed error that names them, before anything happens."""

import pytest
import torch
from torch import fx

import fxpasses
from fxpasses import (
    ContractError,
    OptionsError,
    PassManager,
    PatternError,
    fixpoint,
    graph_pass,
    pattern_pass,
)
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes import ChunkLogits, ConcatMatmuls, FuseMatmulSums, PackDropoutRng, library

NOTHING = graph_pass(lambda gm: False, name="nothing")
ONE = (torch.ones(2),)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: fxpasses.explain_miss(None, None), OptionsError, "explain_miss: a"),
        (lambda: fxpasses.explain_miss("missing.json", 3), OptionsError, "missing.json"),
        (lambda: PassManager(3), TypeError, "PassManager"),
        (lambda: PassManager("eliminate_dead_code"), TypeError, "PassManager"),
        (lambda: PassManager([NOTHING]).order("joined"), ContractError, "'joined'; choose from joint"),
        (lambda: PassManager([NOTHING]).run(None, "inference"), TypeError, "GraphModule"),
        (lambda: fixpoint(3), ContractError, "3 is no Pass"),
        (lambda: fixpoint(NOTHING, limit="x"), ContractError, "limit is 'x'"),
        (lambda: fixpoint(NOTHING, limit=True), ContractError, "limit is True"),
        (lambda: graph_pass(3), ContractError, "3 is no function"),
        (lambda: graph_pass(lambda: False), ContractError, "too many positional arguments"),
        (lambda: graph_pass(lambda gm, limit: False), ContractError, "missing a required argument: 'limit'.*default"),
        (lambda: fxpasses.capture(len, *ONE, passes="default"), OptionsError, "passes.*a list"),
        (lambda: fxpasses.check(3, *ONE), OptionsError, "model.*a module or function"),
        (lambda: fxpasses.save(3, "file.fxp"), OptionsError, "compiled.*fxpasses.compile"),
        (lambda: graph_pass(len, name=3), ContractError, "name is 3"),
        (lambda: graph_pass(len, name=""), ContractError, "name is ''"),
        (lambda: graph_pass(len, graphs=3), ContractError, "graphs is 3"),
        (lambda: graph_pass(len, graphs=[]), ContractError, "graphs is empty"),
        (lambda: graph_pass(len, requires=[3]), ContractError, r"requires is \[3\]"),
        (lambda: pattern_pass(None, torch.cos, ONE), PatternError, "pattern is None"),
        (lambda: pattern_pass(torch.sin, 3, ONE), PatternError, "replacement is 3"),
        (lambda: pattern_pass(torch.sin, torch.cos, ONE, where=3), PatternError, "where is 3"),
        (lambda: pattern_pass(torch.sin, torch.cos, ONE, name=3), PatternError, "name is 3"),
        (lambda: parse_pass("concat_matmuls{max_rows}", library()), OptionsError, "value for option 'max_rows'"),
        (lambda: parse_pass("concat_matmuls{max_rows=1 max_rows=2}", library()), OptionsError, "once"),
        (lambda: parse_pass("concat_matmuls{max_rows=0}", library()), OptionsError, "max_rows.*at least 1"),
        (lambda: parse_pass("concat_matmul", library()), OptionsError, "'concat_matmuls'. Valid passes"),
        (lambda: ConcatMatmuls(max_rows="x"), OptionsError, "concat_matmuls: max_rows.*integer"),
        (lambda: FuseMatmulSums(gain=None), OptionsError, "fuse_matmul_sums: gain.*a number"),
        (lambda: FuseMatmulSums(gain=float("nan")), OptionsError, "fuse_matmul_sums: gain"),
        (lambda: ChunkLogits(chunks=0), OptionsError, "chunk_logits: chunks"),
        (lambda: PackDropoutRng(tolerance=-1), OptionsError, "pack_dropout_rng: tolerance"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, named):
    with pytest.raises(error, match=named):
        call()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"passes": 3}'])
def test_files_that_are_no_record(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(OptionsError, match=r"record\.json is no record"):
        fxpasses.explain_miss(str(tmp_path / "record.json"), tmp_path / "record.json")


def test_a_graph_of_an_unknown_kind_is_left_alone():
    gm = fx.symbolic_trace(lambda x: x.sin())
    before = str(gm.graph)
    with pytest.raises(ContractError, match="unknown kind of graph 'x'"):
        PassManager([graph_pass(lambda gm: gm.graph.erase_node, name="wrong")]).run(gm, "x")
    assert str(gm.graph) == before
