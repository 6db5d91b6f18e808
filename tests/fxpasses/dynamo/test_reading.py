"""What is read in less time is what torch reads."""

import copy

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils._config_module import ConfigModule

from fxpasses.dynamo._torch_reading import quick_settings
from tests.fxpasses.dynamo.support import Stack, agree, compiled


def _settings(config):
    found = {}
    for name in config._config:
        try:
            found[name] = getattr(config, name)
        except AttributeError as error:
            found[name] = str(error)
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "config", [dynamo_config, inductor_config, functorch_config], ids=["dynamo", "inductor", "aot"]
)
def test_every_setting_is_what_torch_says(config):
    original = ConfigModule.__getattr__
    expected = copy.deepcopy(_settings(config))
    with quick_settings():
        assert _settings(config) == expected
        with pytest.raises(AttributeError, match="no_such_setting does not exist"):
            config.no_such_setting  # noqa: B018
    assert ConfigModule.__getattr__ is original


def test_a_setting_that_is_changed_meanwhile():
    before = dynamo_config.recompile_limit
    with quick_settings():
        with dynamo_config.patch(recompile_limit=before + 3):
            assert dynamo_config.recompile_limit == before + 3
        assert dynamo_config.recompile_limit == before
        dynamo_config.recompile_limit = before + 1
        dynamo_config.recompile_limit = before
    assert dynamo_config.recompile_limit == before


def test_a_list_is_the_same_list_each_time():
    with quick_settings():
        first = inductor_config.cpp.cxx
        assert inductor_config.cpp.cxx is first
    assert inductor_config.cpp.cxx is first


def test_another_size_of_a_copied_layers_parameter_is_seen():
    model = Stack()
    call = compiled(model, dynamic=True)
    agree(model, call, torch.randn(4, 8))
    last = model.layers[-1]
    last.linear.weight = torch.nn.Parameter(torch.randn(1, 8))  # its result is broadcast over eight columns
    last.linear.bias = torch.nn.Parameter(torch.randn(1))
    agree(model, call, torch.randn(4, 8))
    agree(model, call, torch.randn(6, 8))
