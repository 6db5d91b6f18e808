"""The search for rules: what it finds, what it leaves out, and where a graph holds a rule."""

import pytest
import torch

import fxpasses
from benchmarks import found_rules
from benchmarks.found_rules import Rule, Search, Term, certified, sites


@pytest.fixture(scope="module")
def rules():
    found = Search(found_rules._LINEAR, 2).run()
    return {str(rule).partition("    ")[0]: rule for rule in found}


def test_rules_are_found_and_what_follows_from_them_is_not(rules):
    assert {
        "(X @ W) @ U  ->  X @ (W @ U)",
        "X @ (W @ U)  ->  (X @ W) @ U",
        "t(t(X))  ->  X",
        "rows(X * a)  ->  a * rows(X)",
    } <= rules.keys()
    assert rules["(X @ W) @ U  ->  X @ (W @ U)"].gain < 0.1
    assert not [text for text in rules if text.startswith(("(W @ U)", "t(t(W))", "Y"))], "other names"


def test_a_certificate_is_of_other_sizes_and_refuses_luck(rules):
    assert certified(rules["rows(X * a)  ->  a * rows(X)"]).kind == "EQUAL"
    a, r = Term("a", ("1", "k")), Term("r", ("n", "1"))
    product, relu = Term("mul", ("n", "k"), (a, r)), Term("relu", ("n", "1"), (r,))
    lucky = Rule(Term("relu", ("n", "k"), (product,)), Term("mul", ("n", "k"), (a, relu)), 0.5, {})
    assert certified(lucky).kind == "DIFFERENT"


def test_sites_are_seen_through_views_where_nothing_else_reads_them(rules):
    x, w, u = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5, 6)
    chain = rules["(X @ W) @ U  ->  X @ (W @ U)"]

    def count(function):
        return sites(fxpasses.capture(function, x, w, u).forward, chain)

    assert count(lambda x, w, u: (x @ w) @ u) == 1
    assert count(lambda x, w, u: x @ (w @ u)) == 0
    assert count(lambda x, w, u: ((x @ w) @ u, (x @ w).sin())) == 1
    assert count(lambda x, w, u: (lambda y: (y @ u, y.sin()))(x @ w)) == 0
