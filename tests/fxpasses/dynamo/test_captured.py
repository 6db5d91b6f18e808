"""What is left out and what is sped up while AOTAutograd traces a captured graph."""

import torch
from torch.fx.experimental import proxy_tensor

import fake
import fxpasses
from fxpasses.dynamo._torch import without_function_metadata


def test_a_graph_that_asks_for_sizes_through_the_operator() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.ops.aten.size.default(x)
        return x.reshape(rows * columns) * rows

    compiled = torch.compile(program, backend="fxpasses", dynamic=True, options={"compiler": "eager"})
    for rows in (3, 5, 8):
        x = torch.rand(rows, 4, requires_grad=True)
        result = compiled(x)
        assert torch.equal(result, program(x))
        result.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, rows))


def test_only_the_tracer_of_aot_goes_without_the_mode() -> None:
    original = proxy_tensor.TorchFunctionMetadataMode
    plain = torch.fx.symbolic_trace(lambda x: x + 1)
    asks = torch.fx.symbolic_trace(lambda x: torch.ops.aten.size.default(x))
    with without_function_metadata(asks):
        assert proxy_tensor.TorchFunctionMetadataMode is original
    with without_function_metadata(plain):
        export = proxy_tensor._ModuleStackTracer(plain)
        assert isinstance(proxy_tensor.TorchFunctionMetadataMode(export), original)
        assert not isinstance(
            proxy_tensor.TorchFunctionMetadataMode(proxy_tensor.PythonKeyTracer()), original
        )
    assert proxy_tensor.TorchFunctionMetadataMode is original


def test_a_backward_graph_that_is_compiled_late_is_compiled_with_acceleration() -> None:
    seen: dict[str, bool] = {}

    @fxpasses.graph_pass(graphs="any")
    def note(gm: torch.fx.GraphModule) -> bool:
        seen[str(len(seen))] = fake.accelerate.is_enabled()
        return False

    for accelerate in (True, False):
        torch._dynamo.reset()
        seen.clear()
        x = torch.rand(4, requires_grad=True)
        options = {"compiler": "eager", "passes": (note,), "accelerate": accelerate}
        torch.compile(lambda x: x.sin() * 2, backend="fxpasses", options=options)(x).sum().backward()
        assert len(seen) >= 3
        assert set(seen.values()) == {accelerate}
