"""Random graphs with random hooks, custom Functions and passes: capture and eager must agree."""

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.compiled_autograd.support import check, flat, keep


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor + 0 * ctx.saved_tensors[0], None


def in_place(x):
    y = x.clone()
    y[:, 0].mul_(2)
    return y


UNARY = [
    torch.sin,
    torch.tanh,
    torch.relu,
    lambda x: x.t().contiguous().t(),
    lambda x: x[:, :2].repeat(1, 2),
    lambda x: x.sum(0, keepdim=True).expand(4, 4),
    lambda x: Scale.apply(x, 3),
    lambda x: torch.cat(x.split(2)[::-1]),
    lambda x: x.softmax(-1),
    lambda x: x.detach() * x,
    in_place,
    lambda x: checkpoint(torch.sigmoid, x, use_reentrant=False),
]
BINARY = [torch.add, torch.mul, torch.mm, torch.sub, torch.maximum, lambda a, b: torch.where(a > b, a, b)]


def program(seed):
    """A function that builds and differentiates the graph of ``seed``, and returns all that can be observed."""

    def run():
        rng = random.Random(seed)
        torch.manual_seed(seed)
        events = []

        def note(name, change):
            def hook(*args):
                grads = args[0] if isinstance(args[0], tuple) else (args[0],)
                events.append((name, [None if g is None else g.detach().clone() for g in grads]))
                return change(*args)

            return hook

        leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(rng.randint(1, 4))]
        values = list(leaves)
        for step in range(rng.randint(3, 14)):
            if rng.random() < 0.5:
                value = rng.choice(UNARY)(rng.choice(values))
            else:
                value = rng.choice(BINARY)(rng.choice(values), rng.choice(values))
            if value.requires_grad:
                kind = rng.random()
                if kind < 0.1:
                    value.register_hook(note(f"replace {step}", lambda g: g * 0.5))
                elif kind < 0.2:
                    value.register_hook(note(f"watch {step}", lambda g: None))
                elif kind < 0.3 and value.grad_fn is not None:
                    value.grad_fn.register_prehook(note(f"pre {step}", lambda gs: tuple(g * 2 for g in gs)))
                elif kind < 0.4 and value.grad_fn is not None:
                    value.grad_fn.register_hook(note(f"post {step}", lambda gi, go: None))
                elif kind < 0.5 and value.grad_fn is not None:
                    value.retain_grad()
            values.append(value)
        for number, leaf in enumerate(leaves):
            if rng.random() < 0.3:
                leaf.register_hook(note(f"leaf {number}", lambda g: g + 1))
            if rng.random() < 0.3:
                leaf.register_post_accumulate_grad_hook(
                    lambda p, number=number: events.append((f"accumulated {number}", p.grad.clone()))
                )
        out = sum((value.sum() for value in values[-3:]), torch.zeros(()))
        mode = rng.choice(["backward", "twice", "grad", "inputs", "double"])
        result = []
        if mode == "backward":
            out.backward()
        elif mode == "twice":
            out.backward(retain_graph=True)
            out.backward()
        elif mode == "inputs":
            out.backward(inputs=rng.sample(leaves, rng.randint(1, len(leaves))))
        elif mode == "grad":
            result = torch.autograd.grad(out, leaves, allow_unused=True)
        else:
            result = torch.autograd.grad(out, leaves, allow_unused=True, create_graph=True)
            squares = [g.pow(2).sum() for g in result if g is not None and g.requires_grad]
            if squares:
                sum(squares).backward()
            result = [None if g is None else g.detach() for g in result]
        retained = [value.grad for value in values if value.is_leaf or value.retains_grad]
        return [list(result), retained, events]

    return run


@pytest.mark.parametrize("compiler", [keep, flat])
@pytest.mark.parametrize("seed", range(25))
def test_random_graphs(seed, compiler):
    # checkpoints that are differentiated twice run in eager
    check(program(seed), compiler, fallbacks=None)
