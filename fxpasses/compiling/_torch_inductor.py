"""Private torch names about Inductor's results: saving them, C++ kernels, failures, and random operators."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._dynamo.repro.after_aot import generate_compiler_repro_string
from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, should_bundle_autograd_cache
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.cpp_builder import is_gcc
from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker
from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
from torch._inductor.lowering import permute, register_lowering, view
from torch._inductor.mkldnn_ir import LinearUnary
from torch._inductor.output_code import RegionalOutputCode
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import fresh_cache

import fake
from fake.seam.inductor import GraphLowering, OutputCode
from fake.seam.patches import LEDGER
from fxpasses._torch import inductor_config, segment_context, shape_env_of
from fxpasses.graphs.onednn import onednn_matmul, onednn_pixelwise, onednn_pixelwise_weight


def origins_of(error: BaseException) -> list[str]:
    """Names of the nodes that Inductor was generating code for when it raised, innermost frame first."""
    names: dict[str, None] = {}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in list(frame.f_locals.values()):
            if isinstance(value, BaseSchedulerNode):
                for one in value.get_nodes():
                    if one.node is not None:
                        names |= dict.fromkeys(node.name for node in one.node.get_origins())
    return list(names)


def saves_compiled_code() -> bool:
    """Whether AOTAutograd saves compiled graphs themselves, and so requires each to be an ``OutputCode``."""
    return should_bundle_autograd_cache()


def loaded_code(code: OutputCode, graph_kwargs: Any) -> OutputCode:
    """Make compiled code that was read from disk ready to call."""
    with segment_context():
        loadable = BundledOutputCodeLoadable(code)
        return loadable.post_compile(loadable.load([]), graph_kwargs)


INDUCTOR_RANDOM = torch.ops.prims.inductor_random.default
INDUCTOR_RANDINT = torch.ops.prims.inductor_randint.default
"""Inductor's operators that draw random numbers from a seed."""


def inductor_repro(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Write a program that passes a graph and inputs like these to Inductor, in torch's own repro format."""
    with inductor_config.patch(custom_partitioner_fn=None):
        text = generate_compiler_repro_string(gm, inputs)
    text = re.sub(r"(?m)^os\.environ\['TORCHINDUCTOR_CACHE_DIR'\] = .*\n", "", text)
    return text + _RUN_REPRO.format(mode="symbolic" if shape_env_of(inputs) is not None else "real")


_RUN_REPRO = """
if __name__ == "__main__":
    from torch._dynamo.repro.after_aot import run_repro

    with torch.no_grad():
        run_repro(mod, load_args, accuracy=False, command="run", save_dir=None, tracing_mode="{mode}", check_str=None)
"""


_CODEGEN = LEDGER.thread_patch(
    GraphLowering,
    "codegen",
    lost="what is put into the code that Inductor generates: kernels of a graph in one unit",
)


def rewritten_code(rewrite: Callable[[str], str]) -> AbstractContextManager[None]:
    """Let a function see and rewrite the Python code that Inductor generates in this thread.

    The function must preserve the number of lines.
    """

    def codegen(self: GraphLowering) -> Any:
        code = _CODEGEN.torchs(self)
        if isinstance(getattr(code[0], "value", None), str):
            code[0].value = rewrite(code[0].value)
        return code

    return LEDGER.using((_CODEGEN, codegen))


_INSTRUCTION_SETS = LEDGER.thread_patch(
    cpu_vec_isa, "valid_vec_isa_list", lost="seconds of the first compilation on a machine"
)


def one_instruction_set() -> AbstractContextManager[None]:
    """Let Inductor ask in this thread only for the instruction set that it will take: the widest that works.

    It tries all of them, and to try one is to compile and load a program.
    """

    def valid_vec_isa_list() -> list[Any]:
        is_chosen = inductor_config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
        if is_chosen or platform.machine() not in ("x86_64", "AMD64"):
            return _INSTRUCTION_SETS.torchs()
        flags = x86_isa_checker()
        fit = (isa for isa in supported_vec_isa_list if all(flag in flags for flag in str(isa).split()))
        return list(itertools.islice(filter(None, fit), 1))

    return LEDGER.using((_INSTRUCTION_SETS, valid_vec_isa_list))


CPP_ENTRY = CppPythonBindingsCodeCache.entry_function
"""The last part of the name under which Inductor imports a compiled unit."""


def load_cpp(source: str, submit: Callable[..., Any] | None) -> Callable[[], Any]:
    """Compile a Python module in C++ as Inductor compiles a kernel: same flags, precompiled header and cache.

    Args:
        source: the module.
        submit: starts the compiler in another thread. With ``None``, it runs when the module is requested.

    Returns:
        A function that waits for the compiler and returns the module.
    """
    return CppPythonBindingsCodeCache.load_async(source, "cpu", submit_fn=submit, extra_flags=kernel_flags())


def load_cpp_kernel(argtypes: list[str], source: str, submit: Callable[..., Any] | None) -> Any:
    """Compile and bind a C++ kernel: itself, or a future for ``AsyncCompile``. Args: see :func:`load_cpp`."""
    load = CppPythonBindingsCodeCache.load_pybinding_async(
        argtypes, source, submit_fn=submit, extra_flags=kernel_flags()
    )
    return load() if submit is None else LambdaFuture(load)


def kernel_flags() -> tuple[str, ...]:
    """Compiler flags for C++ kernels, in addition to Inductor's own.

    GCC (seen in 12.2) lets local arrays that are live at the same time share memory, such as a tile that is
    still to be transposed and the values gathered for its next row. Gradients through a scan came out wrong.
    """
    return ("-fstack-reuse=none",) if is_gcc() else ()


def cache_for_code() -> contextlib.AbstractContextManager[Any]:
    """Enter the code cache directory. With caches off, this block gets its own, as Inductor graphs do."""
    return fresh_cache() if inductor_config.force_disable_caches else contextlib.nullcontext()


for _operator in (onednn_matmul, onednn_pixelwise, onednn_pixelwise_weight):
    fake.cache_custom_op(_operator)


@register_lowering(onednn_matmul, type_promotion_kind=None)
def _lower_onednn_matmul(a: Any, b: Any, bias: Any) -> Any:
    """Inductor's oneDNN call for frozen weights, without copies of strided matrices: it takes strides."""
    rows, columns = a.get_size()[0], b.get_size()[1]
    inputs = [LinearUnary.realize_input(value) for value in (a, permute(b, [1, 0]))]
    constants: list[Any] = ["none", [-1], ""]
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(LinearUnary.require_contiguous(LinearUnary.realize_input(bias)))
    for value in inputs:
        value.freeze_layout()
    layout = FixedLayout(device=a.get_device(), dtype=a.get_dtype(), size=[rows, columns])
    return TensorBox.create(LinearUnary(layout=layout, inputs=inputs, constant_args=constants))


def _pixels(x: Any) -> Any:
    """The pixels of an image as rows, in channels-last layout as Inductor lays out convolutions."""
    n, channels, h, w = x.get_size()
    return view(permute(ExternKernel.require_channels_last(x), [0, 2, 3, 1]), [n * h * w, channels])


@register_lowering(onednn_pixelwise, type_promotion_kind=None)
def _lower_onednn_pixelwise(x: Any, weight: Any, bias: Any, like: Any) -> Any:
    n, _, h, w = x.get_size()
    out, channels, *_ = weight.get_size()
    product = _lower_onednn_matmul(_pixels(x), permute(view(weight, [out, channels]), [1, 0]), bias)
    return permute(view(product, [n, h, w, out]), [0, 3, 1, 2])


@register_lowering(onednn_pixelwise_weight, type_promotion_kind=None)
def _lower_onednn_pixelwise_weight(grad: Any, x: Any) -> Any:
    out, channels = grad.get_size()[1], x.get_size()[1]
    if out > channels:  # many short rows take the kernel up to twice as long
        product = permute(_lower_onednn_matmul(permute(_pixels(x), [1, 0]), _pixels(grad), None), [1, 0])
    else:
        product = _lower_onednn_matmul(permute(_pixels(grad), [1, 0]), _pixels(x), None)
    return view(product, [out, channels, 1, 1])
