"""Plans of small models, made once in a separate process."""

import json
import shutil
from pathlib import Path

import pytest

from fxpasses.plans import native
from fxpasses.plans.running.runtime import load_library
from fxpasses.plans.tensors import same_tensors
from tests import children

PROGRAM = """
import json, os, sys
import torch, fxpasses
sys.path.insert(0, {here!r})
from models_for_plans import MODELS, batches, inputs
found = {{}}
for name in sys.argv[2:] or MODELS:
    make = MODELS[name]
    torch.manual_seed(0)
    fxpasses.reset_stats()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # which sizes it takes for dynamic it remembers over all modules
    model = make()
    compiled = fxpasses.compile(model, cache=sys.argv[1], regions="always" if name.startswith("repeated") else "off")
    agree = []
    for batch in batches(name):
        results = []
        before = {{key: value.clone() for key, value in model.state_dict().items()}}
        for call in (compiled, model):
            model.load_state_dict(before)
            given = inputs(batch)
            leaf = given[0].requires_grad_() if name in ("shared memory", "changed input") else None
            if leaf is not None:
                given = (leaf * 1,)
            with torch.set_grad_enabled(name != "inference"):
                out = call(*given)
            leaves = torch.utils._pytree.tree_leaves(out)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if name == "results":
                assert out.logits is out["logits"] and out.rest.first is given[0] and out.rest.second[1] is model.weight
                kinds = [type(value).__name__ for value in (out, out.rest, out.rest.second[0])]
                assert kinds == ["Answer", "Pair", "max"] and list(out) == list(vars(out)), (kinds, list(out), vars(out))
                tensors = [out.logits, out.rest.second[0].values, out.rest.second[0].indices]
            assert name != "graph break" or out[1] is model.notes
            assert name != "shared memory" or out[0][0] is given[0]
            places = [t.untyped_storage().data_ptr() for t in (*tensors, given[0], *model.parameters())]
            tensors += [torch.tensor([[a == b for a in places] for b in places]), given[0]]
            tensors += [buffer.clone() for buffer in model.buffers()]
            if name != "inference":
                sum(t.sin().sum() for t in tensors if t.requires_grad).backward()
                tensors += [t.grad.clone() for t in (*model.parameters(), leaf) if t is not None]
                model.zero_grad()
            results.append((type(out).__name__, len(leaves), tensors))
        (kind, count, got), (wanted_kind, wanted_count, wanted) = results
        agree.append(kind == wanted_kind and count == wanted_count and len(got) == len(wanted)
                     and all(a.requires_grad == b.requires_grad and torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted)))
    stats = fxpasses.stats()
    if stats.plans_written and not os.path.exists(sys.argv[1] + "/" + name + ".fxp"):
        fxpasses.save(compiled, sys.argv[1] + "/" + name + ".fxp")
    found[name] = [all(agree), stats.plans_used, stats.plans_written, stats.plans_refused]
dynamo = "torch._dynamo" in sys.modules
fxpasses.reset_stats()
for method in (False, True):
    torch.manual_seed(0)
    model, given = MODELS["training"](), dict(backend="fxpasses", options=dict(cache=sys.argv[1], regions="off"))
    expected = model(*inputs())
    compiled = model if method else torch.compile(model, **given)
    if method:
        model.compile(**given)
    assert torch.allclose(compiled(*inputs()), expected, atol=1e-5)
stats = fxpasses.stats()
print(json.dumps([found, dynamo, [stats.plans_used, stats.graphs, "torch._inductor.compile_fx" in sys.modules]]))
"""


@pytest.fixture(scope="session")
def run_models():
    """Runs models in a process of its own, with the plans of a directory: what it found, whether Dynamo was imported, and
    how many plans of one of them ``torch.compile`` used, how many graphs it compiled, and whether Inductor was imported."""
    return _run


def _run(cache, *names, run=children.run_fresh):
    done = run("-c", PROGRAM.format(here=str(Path(__file__).parent)), cache, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def cold(cache):
    return _run(cache, run=children.run)[0]


@pytest.fixture(scope="module", params=["guards", "memory"])
def checks(request):
    """Who checks a call: torch's guards, or the library that compares memory."""
    before, native._module = native._module, None
    if request.param == "memory":
        library = native._compile_library(shutil.which("cc") or "cc")
        if library is None:
            pytest.skip("no compiler")
        native.use_library(lambda: load_library(native.ENTRY, library, None))
        assert same_tensors.memory_library() is native.library()
    yield request.param
    native._module = before
