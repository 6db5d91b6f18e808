"""The factors that determine a compilation, as text by name, most general first."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fake.seam.dtensor import mesh_of
from fxpasses._torch import dynamo_config, functorch_config, inductor_config
from fxpasses.compiling.environment import deciding_variables, own_source
from fxpasses.compiling.options import Options

CAPTURED_BACKWARD = "captured_backward"
"""The key in ``meta`` of a graph that the ``compiled_autograd`` option captured."""


def compile_factors(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> dict[str, str]:
    """Describe what determines a compilation besides its graph's calls and the passes, before any stage runs.

    Args:
        gm: the Dynamo graph.
        inputs: its example inputs: fake tensors and symbolic sizes.
        options: the options of the compilation.

    Returns:
        Text by factor name, most general first: what is compiled, versions, environment variables, settings, options, inputs.
    """
    return {
        "what is compiled": "a captured backward pass" if gm.meta.get(CAPTURED_BACKWARD) else "a function",
        **compile_surroundings(),
        **deciding_variables(),
        "training mode": _training_mode(gm),
        "dynamic sizes": ", ".join(str(size) for size in inputs if isinstance(size, torch.SymInt)) or "none",
        **_settings(options),
        **_inputs(gm, inputs),
    }


def graph_text(gm: fx.GraphModule) -> str:
    """The calls of a graph, one per line, including those of the graphs that it calls.

    Inputs that are device meshes have no line: their names depend on what was read first, a hook or a
    parameter, and carry no information.
    """
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and mesh_of(node.meta.get("example_value")) is not None:
            continue
        target = node.target if isinstance(node.target, str) else qualified(node.target)
        lines.append(f"{node.name} = {node.op} {target} {node.args} {node.kwargs or ''}".rstrip())
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            lines += [f"{name}: {line}" for line in graph_text(child).splitlines()]
    return "\n".join(lines)


def compile_surroundings() -> dict[str, str]:
    """Versions, hardware and the state of torch, as text by name."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "fxpasses source": own_source(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "gradients enabled": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str({kind: _autocast(kind) for kind in ("cpu", "cuda")}),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _settings(options: Options) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, config, patches in (
        ("dynamo", dynamo_config, {}),
        ("inductor", inductor_config, options.inductor_patches()),
        ("functorch", functorch_config, {}),
    ):
        values = {**config.get_config_copy(), **patches}  # type: ignore[attr-defined]
        # An address differs from process to process.
        stable = {key: value for key, value in values.items() if " at 0x" not in repr(value)}
        found |= {f"{name} setting {key}": _setting(value) for key, value in stable.items()}
    for field in dataclasses.fields(options):
        if field.name not in ("passes", "inductor", "report", "cache"):
            found[f"option {field.name}"] = repr(getattr(options, field.name))
    return found


def _inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, str]:
    """Map ``"shape of input x"`` and so on to text. Each property of each input is a factor of its own."""
    found: dict[str, str] = {}
    names = input_names(gm)
    if len(set(names)) < len(inputs):
        names = [str(position) for position in range(len(inputs))]
    for name, value in zip(names, inputs, strict=False):
        # A device mesh: see graph_text.
        if not isinstance(value, torch.SymInt) and mesh_of(value) is None:
            found |= {f"{label} of input {name}": text for label, text in _properties(value)}
    return found


def input_names(gm: fx.GraphModule) -> list[str]:
    """The user's names for the inputs of a Dynamo graph, in order."""
    return [_input_name(str(node.target)) for node in gm.graph.find_nodes(op="placeholder")]


def _input_name(target: str) -> str:
    """Turn Dynamo's ``L_block_parameters_weight_`` into ``block.weight``."""
    name = target.removeprefix("L_").rstrip("_")
    for part in ("modules", "parameters", "buffers"):
        name = name.replace(f"_{part}_", ".")
    return name


def _properties(value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, torch.Tensor):
        # The text of other objects may be long, or read tensors whose memory is freed (FSDP2 parameters).
        yield "value", str(value) if isinstance(value, _PLAIN) else type(value).__qualname__
        return
    yield "dtype", str(value.dtype)
    yield "shape", str(tuple(value.shape))
    dense = value.layout is torch.strided
    yield (
        "strides",
        "row-major"
        if dense and value.is_contiguous()
        else str(value.stride())
        if dense
        else str(value.layout),
    )
    yield "device", str(value.device)
    yield "requires_grad", str(value.requires_grad)


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


def _training_mode(gm: fx.GraphModule) -> str:
    """The mode given to calls that behave differently in training (dropout, batch norm)."""
    modes = set()
    for node in gm.graph.nodes:
        position = _position_of_training(node.target) if node.op == "call_function" else None
        if position is not None:
            given = node.args[position] if position < len(node.args) else node.kwargs.get("training")
            modes.add("training" if given else "evaluation")
    return " and ".join(sorted(modes)) or "makes no difference"


@functools.cache
def _position_of_training(target: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # built-in functions have no signature
        return None
    return names.index("training") if "training" in names else None


def qualified(target: Any) -> str:
    """The name of a function with its module, identical in every process."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if not name or module.startswith("torch._ops."):  # for operators, this names a pybind11 class
        return str(target)
    return f"{module}.{name}"


def _autocast(device: str) -> str:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _setting(value: Any) -> str:
    """The text of a setting. Sets are sorted, because their order differs from process to process."""
    return repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
