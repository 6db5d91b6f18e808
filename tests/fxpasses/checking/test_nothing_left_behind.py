"""What checks and tuning compile is forgotten, and nothing else is."""

import threading

import torch

from fxpasses.checking.stages._torch_dynamo import discard_dynamo_state


def counted(compiled):
    def backend(gm, inputs):
        compiled.append(gm)
        return gm.forward

    return backend


def test_what_was_compiled_inside_is_compiled_again():
    inside, before = [], []
    first = torch.compile(lambda x: x + 1, backend=counted(before))
    second = torch.compile(lambda x: x + 2, backend=counted(inside))
    first(torch.ones(2))
    with discard_dynamo_state():
        first(torch.ones(2))
        second(torch.ones(2))
    first(torch.ones(2))
    second(torch.ones(2))
    assert (len(before), len(inside)) == (1, 2)


def test_what_another_thread_compiles_meanwhile_stays():
    """It may be inside of the compiled code, which would be freed."""
    compiled = []
    other = torch.compile(lambda x: x * 3, backend=counted(compiled))
    with discard_dynamo_state():
        thread = threading.Thread(target=lambda: other(torch.ones(2)))
        thread.start()
        thread.join()
    other(torch.ones(2))
    assert len(compiled) == 1
