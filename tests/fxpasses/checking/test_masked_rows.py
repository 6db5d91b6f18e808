"""Scores that are masked, though the graph does not show it."""

import pytest
import torch

from fxpasses import capture, pattern_pass
from fxpasses.checking.critical.masked_rows import with_masked_rows
from fxpasses.testing import prove


def with_sink(scores, sink):
    """Attention with a sink: https://arxiv.org/abs/2309.17453"""
    beside = sink.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1].clone(memory_format=torch.contiguous_format)


def shifted_by(largest):
    def without_cat(scores, sink):
        most = largest(scores.amax(-1, keepdim=True), sink)
        exponentials = (scores - most).exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + (sink - most).exp())

    return without_cat


@pytest.mark.parametrize(
    ("largest", "is_right"), [(torch.maximum, True), (lambda most, sink: most, False)], ids=["both", "one"]
)
def test_a_row_that_is_masked_is_tried(largest, is_right):
    inputs = [torch.randn(2, 3, 5), torch.randn(1)]
    proof = prove(pattern_pass(with_sink, shifted_by(largest), inputs), with_sink, *inputs)
    assert proof.ok is is_right, proof


def test_a_whole_row_is_masked_where_the_graph_stands_it():
    x = torch.randn(4, 3)
    gm = capture(lambda x: x.exp() / (x.exp().sum(-1, keepdim=True) + 1), x).forward
    (scores,) = with_masked_rows(gm, [x], torch.Generator().manual_seed(0))
    assert scores.isneginf()[-1].all()


def test_what_is_no_score_is_not_masked():
    generator, x, w = torch.Generator().manual_seed(0), torch.randn(4, 3), torch.randn(3, 3)
    gm = capture(lambda x, w: (x * 2 + 1).softmax(-1) @ w, x, w, decompose=True).forward
    scores, weight = with_masked_rows(gm, [x, w], generator)
    assert scores.isneginf().any()
    assert scores.isfinite().any(-1).all()  # a whole row would be NaN
    assert torch.equal(weight, w)
    assert with_masked_rows(capture(lambda x: x.relu(), x).forward, [x], generator) is None
