"""Private torch names around what Inductor returns: how it is saved, what failed in it, and its random operators."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.repro.after_aot import generate_compiler_repro_string
from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    should_bundle_autograd_cache,
)
from torch._inductor.output_code import OutputCode, RegionalOutputCode
from torch._inductor.scheduler import BaseSchedulerNode

from fxpasses._torch import inductor_config, of_segment, shape_env_of

__all__ = [
    "INDUCTOR_RANDINT",
    "INDUCTOR_RANDOM",
    "BypassAOTAutogradCache",
    "OutputCode",
    "RegionalOutputCode",
    "inductor_repro",
    "loaded_code",
    "origins_of",
    "saves_compiled_code",
]


def origins_of(error: BaseException) -> list[str]:
    """Names of the graph's nodes that Inductor was generating code for when it raised, innermost frame first."""
    names: dict[str, None] = {}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in list(frame.f_locals.values()):
            if isinstance(value, BaseSchedulerNode):
                for one in value.get_nodes():
                    if one.node is not None:
                        names |= dict.fromkeys(node.name for node in one.node.get_origins())
    return list(names)


def saves_compiled_code() -> bool:
    """Whether AOTAutograd saves compiled graphs themselves, and asks for each as an ``OutputCode``."""
    return should_bundle_autograd_cache()


def loaded_code(code: OutputCode, graph_kwargs: Any) -> OutputCode:
    """Compiled code that was read from a disk, ready to be called."""
    with of_segment():
        loadable = BundledOutputCodeLoadable(code)
        return loadable.post_compile(loadable.load([]), graph_kwargs)


INDUCTOR_RANDOM = torch.ops.prims.inductor_random.default
INDUCTOR_RANDINT = torch.ops.prims.inductor_randint.default
"""Inductor's operators that draw random numbers from a seed."""


def inductor_repro(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """A program that gives a graph to Inductor with inputs like these, in the form in which torch writes its own."""
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
