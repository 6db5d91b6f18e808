"""Pass 'wrong_at_one_site' changes what a inference graph computes. output 0: off by 2 from float64 at [0] (2.58e+08 ulp; the reference is off by 1.34e-07), 4 elements, on the inputs of this call

Exits with 1 as long as the pass is wrong. Written by fxpasses."""

import sys

import torch

sys.path.insert(0, '/work/wt/check')

from tests.fxpasses.checking.plants import wrong_at_one_site
from fxpasses.checking.repro import replay

PASS = wrong_at_one_site


def graph(arg0_1):
    add_52 = torch.ops.aten.add.Tensor(arg0_1, 17)
    neg_70 = torch.ops.aten.neg.default(add_52)
    neg_71 = torch.ops.aten.neg.default(neg_70)
    return (neg_71,)

torch.manual_seed(0)
inputs = [
    torch.randn((1,), dtype=torch.float32),
]

if __name__ == "__main__":
    raise SystemExit(replay(graph, inputs, PASS))
