"""Models with their own hooks, which run in Python around the compiled code."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Breaks(Model):
    def forward(self, x):
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.sin()


class InPython(Model):
    @torch._dynamo.disable(recursive=False)
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return self.linear(x).cos()


MODELS = (Model, Breaks, InPython)
seen = []


def twice(module, args):
    return (args[0] * 2,)


def after(module, args, output):
    return output + 1


def counts(module, args, output):
    seen.append(1)


def of_gradients(module, inputs, outputs):
    return tuple(gradient * 3 for gradient in inputs)


HOOKS = {
    "before": lambda m: m.register_forward_pre_hook(twice),
    "after": lambda m: m.register_forward_hook(after),
    "both": lambda m: [m.register_forward_pre_hook(twice), m.register_forward_hook(after)],
    "counts": lambda m: m.register_forward_hook(counts),
    "gradients": lambda m: m.register_full_backward_hook(of_gradients),
    "later": lambda m: None,
    "removed": lambda m: m.register_forward_pre_hook(twice),
    "without a name": lambda m: m.register_forward_hook(lambda module, args, output: output * 5),
}


def run(make, kind, how):
    """What six steps give, in eager and by what ``how`` makes of the model."""
    torch.manual_seed(0)
    model = make()
    handle, run = HOOKS[kind](model), how(model)
    results = []
    for step in range(6):
        if step == 3 and kind == "later":
            model.register_forward_hook(after)
        if step == 3 and kind == "removed":
            handle.remove()
        given = torch.randn(2, 4)
        for call in (model, run):
            x = given.clone().requires_grad_()
            before = len(seen)
            result = call(x)
            result.sum().backward()
            results.append(
                [result, x.grad, model.linear.weight.grad.clone(), torch.tensor(len(seen) - before)]
            )
            model.zero_grad()
    return [
        all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*pair, strict=True))
        for pair in zip(results[::2], results[1::2], strict=True)
    ]
