"""The names of torch that the seam files use are read from their source and held against the installed torch."""

import textwrap

import pytest
import torch
from torch._guards import ChainedSource

from fake.seam.patches import Patch, When, always
from fxpasses.commands.main import main
from fxpasses.doctor import check_seam
from fxpasses.doctor.seam import uses_in

ABSENT = {
    "2.13": {
        "fake/seam/library.py: torch._library.opaque_object.is_opaque_constant_type",
        "fake/seam/library.py: torch._library.opaque_object.register_custom_class",
        "fxpasses/dynamo/_torch.py: torch._dynamo.variables.lazy.ComputedLazyConstantVariable",
        "fxpasses/partitioner/_torch.py: torch.fx.experimental.symbolic_shapes.size_hint",
    },
    "2.14": {"fxpasses/partitioner/_torch.py: torch.fx.experimental.symbolic_shapes.size_hint"},
    "2.15": {"fxpasses/partitioner/_torch.py: torch.fx.experimental.symbolic_shapes.size_hint"},
}
"""What the seam asks for before it uses it, because these releases do not have it."""

RELEASE = ".".join(torch.__version__.split(".")[:2])

SOURCE = """
    import torch
    import torch._dynamo.config as settings
    from torch import _C
    from torch._guards import Source as base, nobody
    from torch._dynamo.utils import set_example_value

    here = torch._C._dispatch_keys
    gone = _C._gone
    quiet = getattr(settings, "suppress_errors", None)
    asked = getattr(settings, "not_there", None)
    if hasattr(torch._C, "_perhaps"):
        perhaps = torch._C._perhaps
    pairs = {"one": (torch._C, "_len_torch_dispatch_stack", here), "two": (torch._C, "_lost", here)}

    def call(settings, node):
        set_example_value(node)
        return settings.anything
"""


def test_what_is_missing_does_not_fit_or_is_asked_for_is_found(tmp_path):
    file = tmp_path / "_torch.py"
    file.write_text(textwrap.dedent(SOURCE))
    patch = Patch(
        ChainedSource, "get_value", always(lambda self, globals_: None), when=When.COMPILATION, lost="a test"
    )
    unfit = Patch(
        torch.nn.Module,
        "forward",
        always(print),
        unfit=lambda: "forward is no function",
        when=When.COMPILATION,
        lost="a test",
    )
    report = check_seam([file], [patch, unfit])
    assert {use.name for use in report.missing} == {
        "torch._guards.nobody",
        "torch._C._gone",
        "torch._C._lost",
    }
    assert {use.name for use in report.absent} == {"torch._dynamo.config.not_there", "torch._C._perhaps"}
    (call, missing_argument), (replaced, not_taken), (_, reason) = report.unfit
    assert call.name == "torch._dynamo.utils.set_example_value"
    assert "example_value" in missing_argument
    assert replaced.name == "torch._guards.ChainedSource.get_value"
    assert "locals, cache" in not_taken
    assert reason == "forward is no function"
    assert not report.ok
    assert f"{file.name}:9: torch._C._gone" in str(report)


def test_a_variable_of_a_function_is_not_the_module_of_that_name():
    names = {use.name for use in uses_in(textwrap.dedent(SOURCE))}
    assert "torch._dynamo.config.suppress_errors" in names
    assert "torch._dynamo.config.anything" not in names


@pytest.mark.skipif(RELEASE not in ABSENT, reason="a release of torch that was not ported to")
def test_the_seam_fits_this_release(capsys):
    assert main(["doctor", "--torch"]) == 0
    told = capsys.readouterr().out.splitlines()
    names = int(told[1].split()[0])
    assert names > 700
    assert told[2:5] == [
        "missing: none",
        "other arguments than it takes: none",
        "not in this release, and asked for before it is used:",
    ]
    assert {line.strip() for line in told[5:]} == ABSENT[RELEASE]
