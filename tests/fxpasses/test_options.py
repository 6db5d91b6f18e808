import pytest
import torch

from fxpasses import ContractError, Options, OptionsError, graph_pass
from fxpasses.passes import EliminateDeadCode, RemoveNoOps, default_passes


def test_defaults():
    options = Options.parse()
    assert options.passes == default_passes()
    assert options.memory_budget is None
    assert options.on_failure == "raise"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_budgt": 0.5}, "did you mean 'memory_budget'"),
        ({"memory_budgt": 0.5}, "accelerate, .*compiler, .*memory_budget, .*passes, .*report"),
        ({"max_autotune": True}, "'inductor': {'max_autotune'"),
        ({"partition": "nobody"}, "partition"),
        ({"partition": "torch", "ranks": "agree"}, "one rank decides"),
        ({"memory_budget": "half"}, "a number from 0.0 to 1.0, got 'half'"),
        ({"memory_budget": True}, "a number"),
        ({"memory_budget": 1.5}, "from 0.0 to 1.0"),
        ({"memory_budget": float("nan")}, "from 0.0 to 1.0"),
        ({"compiler": "inductr"}, "'inductor', 'eager', got 'inductr'; did you mean 'inductor'"),
        ({"on_failure": "Eager"}, "'raise', 'eager'.*; did you mean 'eager'"),
        ({"on_failure": 3}, "'raise', 'eager'.*, got 3$"),
        ({"check": "value"}, "did you mean 'values'"),
        ({"passes": "eliminate_dead_code"}, "a list"),
        ({"passes": "tunned"}, "did you mean 'tuned'"),
        (5, "option 'options': expected names"),
        ({"passes": ["eliminate_ded_code"]}, "did you mean 'eliminate_dead_code'"),
        ({"passes": [EliminateDeadCode]}, r"EliminateDeadCode\(\)"),
        ({"passes": [print]}, "graph_pass"),
        ({"inductor": True}, "a dictionary"),
        ({"inductor": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"inductor": {"max_autotune": "yes"}}, "type bool"),
        ({"inductor": {"custom_partitioner_fn": None}}, "memory_budget"),
        ({"mode": "fast"}, "max-autotune"),
        ({"report": 3}, "a directory"),
        ({"accelerate": 1}, "True or False"),
        ({3: 4}, "unknown option"),
    ],
)
def test_wrong_options_say_what_is_right(given, message):
    with pytest.raises(OptionsError, match=message):
        Options.parse(given)


def test_options_error_has_fields():
    with pytest.raises(OptionsError) as caught:
        Options.parse({"memory_budget": 7})
    assert (caught.value.option, caught.value.given) == ("memory_budget", 7)


def test_default_can_be_extended():
    @graph_pass
    def mine(gm):
        return False

    options = Options.parse({"passes": [mine, "default", RemoveNoOps()]})
    assert options.passes == (mine, *default_passes(), RemoveNoOps())


def test_modes_are_torchs():
    assert Options.parse(mode="reduce-overhead").inductor_patches() == {"triton.cudagraphs": True}
    merged = Options.parse(
        {"mode": "max-autotune", "inductor": {"triton.cudagraphs": False}}
    ).inductor_patches()
    assert merged["max_autotune"] is True
    assert merged["triton.cudagraphs"] is False


def test_torch_compile_reports_a_wrong_option_as_it_is():
    with pytest.raises(OptionsError, match="did you mean 'memory_budget'") as caught:
        torch.compile(lambda x: x + 1, backend="fxpasses", options={"memory_budgt": 1.0})(torch.ones(3))
    assert (caught.value.option, caught.value.given) == ("memory_budgt", 1.0)
    with torch._dynamo.config.patch(suppress_errors=True):  # what cannot be compiled runs in eager then
        torch.testing.assert_close(
            torch.compile(torch.cos, backend="fxpasses", options={"memory_budgt": 1.0})(torch.ones(3)),
            torch.ones(3).cos(),
        )
    with pytest.raises(OptionsError, match="did you mean 'reduce-overhead'"):
        torch.compile(lambda x: x + 1, backend="fxpasses", mode="reduce-overhed")(torch.ones(3))


def test_torch_compile_reports_passes_that_do_not_go_together_as_they_are():
    first, second = (graph_pass(lambda gm: False, name="same", graphs=graphs) for graphs in ("joint", "any"))
    with pytest.raises(ContractError, match="'same'") as caught:
        torch.compile(lambda x: x + 1, backend="fxpasses", options={"passes": [first, second]})(torch.ones(3))
    assert caught.value.passes == ("same", "same")


@pytest.mark.parametrize("value", ["", 3, __file__])
def test_a_report_goes_to_a_directory(value):
    with pytest.raises(OptionsError, match="option 'report'"):
        Options.parse({"report": value})
