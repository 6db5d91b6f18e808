"""``fxpasses.save`` and ``load``: another process and directory, what differs is named, and nothing of a damaged file is used."""

import array
import hashlib
import json
import resource
import shutil
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.commands.main import main
from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.files.archive import read_archive, write_archive
from tests import children

PROGRAM = """
import json, os, sys
import torch, fxpasses
from torch import nn
folder, here = sys.argv[1:]
sys.path.insert(0, here)
from models_for_plans import MODELS, Notes, inputs

def difference(name, change=lambda model: None, call=lambda model, x: model(x), around=torch.enable_grad()):
    torch.manual_seed(0)
    model = MODELS[name]()
    change(model)
    try:
        with around:
            call(fxpasses.load(f"{folder}/{name}.fxp", model, trust=True), *inputs())
    except fxpasses.PlanMismatchError as error:
        return error.factor, error.saved, error.found
    return "fits"

found = {}
for name in ("inference", "repeated", "training", "graph break"):
    torch.manual_seed(1)  # other weights than those that were saved
    model = MODELS[name]()
    loaded = fxpasses.load(f"{folder}/{name}.fxp", model, trust=True)
    with torch.set_grad_enabled(name != "inference"):
        outputs = [call(*inputs()) for call in (loaded, model)]
    found.setdefault("compilers", []).extend([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
    leaves = [[leaf for leaf in torch.utils._pytree.tree_leaves(out) if not isinstance(leaf, Notes)] for out in outputs]
    gradients = []
    for out in leaves:
        if name != "inference":
            sum(t.sum() for t in out if isinstance(t, torch.Tensor)).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*leaves)
    torch.testing.assert_close(*gradients)
found["nothing"] = difference("training")
found["dtype"] = difference("training", lambda m: m.double())
found["flag"] = difference("training", lambda m: m.eval())
found["attribute"] = difference("training", lambda m: setattr(m[1], "extra", 3))
found["number"] = difference("training", lambda m: setattr(m[1], "approximate", "tanh"))
found["layer"] = difference("training", lambda m: m.pop(2))
found["hook"] = difference("training", lambda m: m[0].register_forward_hook(lambda *a: None))
model = MODELS["sizes"]()
sizes = fxpasses.load(f"{folder}/sizes.fxp", model, trust=True)
for batch in (4, 9, 5):
    torch.testing.assert_close(sizes(*inputs(batch)), model(*inputs(batch)))
found["other sizes"] = difference("sizes", call=lambda m, x: m(x[:1]))
found["size"] = difference("training", call=lambda m, x: m(x[:2]))
found["argument"] = difference("training", call=lambda m, x: m(input=x))
found["gradients"] = difference("training", around=torch.no_grad())
found["subclass"] = difference("training", call=lambda m, x: m(nn.Buffer(x).as_subclass(type("Mine", (torch.Tensor,), {}))))
with torch.device("cpu"):
    found["mode"] = difference("training")
os.environ["TORCHINDUCTOR_FREEZING"] = "1"
found["variable"] = difference("training")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(run_models, tmp_path_factory):
    """The saved files, in another directory than that of the process that made them."""
    made, folder = tmp_path_factory.mktemp("plans"), tmp_path_factory.mktemp("elsewhere")
    made.chmod(0o700)
    names = "repeated", "training", "inference", "sizes", "graph break"
    run_models(made, *names, run=children.run)
    for name in names:
        shutil.copy(made / f"{name}.fxp", folder)
    return folder


@pytest.mark.slow
def test_another_process_runs_it_or_names_what_differs(saved):
    done = children.run_fresh("-c", PROGRAM, saved, Path(__file__).parent, cwd=saved)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("subclass")[0].startswith("a tensor subclass")
    assert found.pop("hook")[0].startswith("model.0._forward_hooks")
    assert found == {
        "compilers": [],
        "nothing": "fits",
        "dtype": ["dtype of model.0.weight", "torch.float32", "torch.float64"],
        "flag": ["model.training", "bool True", "bool False"],
        "attribute": ["model.1.extra", "absent", "there"],
        "number": ["model.1.approximate", "str 'none'", "str 'tanh'"],
        "layer": ["model.2", "there", "absent"],
        "other sizes": ["sizes of arguments", "others", "(1, 8)"],
        "size": ["sizes of argument 0", "(4, 8)", "(2, 8)"],
        "argument": ["number of positional arguments", "1", "0"],
        "gradients": ["gradients enabled", "True", "False"],
        "mode": ["a dispatch or function mode is active", "no", "yes"],
        "variable": ["environment variable TORCHINDUCTOR_FREEZING", "not set", "1"],
    }


@pytest.mark.slow
def test_the_command_tells_what_is_in_it(saved, capsys):
    assert main(["inspect", str(saved / "training.fxp"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == "torch.nn.modules.container.Sequential"
    assert told["plans"][0]["arguments"] == {"argument 0": "torch.float32 [4, 8], strides [8, 1]"}
    assert told["made by"]["torch"].startswith(torch.__version__)
    assert main(["inspect", str(saved / "training.fxp")]) == 0
    assert "plan 0: training" in capsys.readouterr().out
    (saved / "cut.fxp").write_bytes((saved / "training.fxp").read_bytes()[:-30])
    assert main(["inspect", str(saved / "cut.fxp")]) == 1
    assert main(["inspect", str(saved / "no such file")]) == 2


@pytest.mark.slow
def test_damaged_files_are_refused(saved, tmp_path):
    content = (saved / "inference.fxp").read_bytes()
    whole = read_archive(saved / "inference.fxp")
    path = tmp_path / "damaged.fxp"
    for place in range(0, len(content), max(1, len(content) // 150)):
        path.write_bytes(content[:place])
        with pytest.raises(PlanFileError, match=r"damaged\.fxp"):
            fxpasses.load(path, nn.Linear(2, 2), trust=True)
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:  # what zip keeps twice, or not for us, may differ
            same = read_archive(path)
        except PlanFileError:
            continue
        assert (same.manifest, same.plans[0]) == (whole.manifest, whole.plans[0])
    # A member in the place of another, one more, and one of the same name again.
    with zipfile.ZipFile(saved / "inference.fxp") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    other = read_archive(saved / "training.fxp").plans[0]
    for changed in (
        {"plans/0/code": other["code"]},
        {"more": b""},
        {"manifest.json": b"{}"},
        {"manifest.sha256": b"0" * 64},
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (members | changed).items():
                archive.writestr(name, data)
        with pytest.raises(PlanFileError):
            read_archive(path)
    with zipfile.ZipFile(saved / "inference.fxp") as archive, zipfile.ZipFile(path, "w") as twice:
        for name in archive.namelist():
            twice.writestr(name, archive.read(name))
        with pytest.warns(UserWarning, match="Duplicate"):
            twice.writestr("plans/0/code", other["code"])
    with pytest.raises(PlanFileError, match="two members"):
        read_archive(path)


@pytest.mark.slow
def test_files_are_not_run_without_trust(saved):
    for how in ({}, {"trust": False}):
        with pytest.raises(PlanFileError, match="trust=True"):
            fxpasses.load(saved / "inference.fxp", nn.Linear(2, 2), **how)
    with pytest.raises(fxpasses.OptionsError, match="trust"):
        fxpasses.load(saved / "inference.fxp", nn.Linear(2, 2), trust="yes")
    with pytest.raises(fxpasses.OptionsError, match="not called yet"):
        fxpasses.save(fxpasses.compile(nn.Linear(2, 2)), saved / "none.fxp")
    with pytest.raises(fxpasses.OptionsError, match=r"what fxpasses\.compile, or torch\.compile"):
        fxpasses.save(nn.Linear(2, 2), saved / "none.fxp")
    assert not (saved / "none.fxp").exists()


@pytest.mark.slow
def test_signatures(saved, tmp_path):
    pytest.importorskip("cryptography", reason="signatures are an extra")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    pem = serialization.Encoding.PEM
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    secret = keys[0].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public, other = (
        k.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo) for k in keys
    )
    plain = read_archive(saved / "inference.fxp")
    manifest = {k: v for k, v in plain.manifest.items() if k not in ("format", "files")}
    signed = tmp_path / "signed.fxp"
    write_archive(signed, manifest, [plain.plans[0]], secret)
    assert read_archive(signed, public).signed
    assert not plain.signed
    for path, key, problem in (
        (signed, other, "does not fit"), (saved / "inference.fxp", public, "not signed"), (signed, b"no key", "cannot be read"),
        (signed, secret, "cannot be read"), (signed, 3, "not int"),
    ):  # fmt: skip
        with pytest.raises(PlanFileError, match=problem):
            read_archive(path, key)
    with zipfile.ZipFile(signed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["manifest.json"] = members["manifest.json"].replace(b"Sequential", b"Sequentiel")
    with zipfile.ZipFile(signed, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(PlanFileError, match="does not fit"):
        read_archive(signed, public)


@pytest.mark.slow
def test_signing_needs_its_package(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(PlanFileError, match="cryptography"):
        fxpasses.load(saved / "inference.fxp", nn.Linear(2, 2), public_key=b"")


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        {"plans": 3},
        {"plans": []},
        {"plans": [{}]},
        {"plans": [{"sections": []}]},
        {"plans": [{"sections": {"plan": "elsewhere", "story": "plans/0/story"}}]},
        {"plans": [{"sections": {"plan": "plans/0/plan"}}]},
        {"plans": [{"sections": {"plan": "plans/0/story", "story": "plans/0/plan"}}]},
    ],
)
def test_a_manifest_of_another_form_is_refused(tmp_path, manifest):
    """Its hash fits: it was written by another program."""
    path = tmp_path / "other.fxp"
    write_archive(path, {"plans": [{}]}, [{"plan": b"{}", "story": b"\x9c"}])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text = json.dumps({**json.loads(members["manifest.json"]), **manifest} if manifest else []).encode()
    members |= {"manifest.json": text, "manifest.sha256": hashlib.sha256(text).hexdigest().encode()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(PlanFileError, match=r"other\.fxp"):
        fxpasses.load(path, nn.Linear(2, 2), trust=True)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "model.fxp"
    write_archive(path, {"plans": [{}]}, [{"plan": b"{}"}])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_archive(path, {"plans": [{}]}, [{"plan": bytes(100_000)}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.fxp"]


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    path = tmp_path / "model.fxp"
    contents = [bytes([i]) * 50_000 for i in range(8)]
    writers = [
        threading.Thread(target=write_archive, args=(path, {"plans": [{}]}, [{"plan": c, "story": b""}]))
        for c in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert read_archive(path).plans[0]["plan"] in contents
    assert read_archive(path).plans[0]["plan"] in contents


class Doubling(nn.Module):
    def forward(self, x):
        return x.sin() * 2


@pytest.mark.parametrize("how", ["function", "module", "in place"])
def test_what_torch_compile_made_is_saved(tmp_path, how):
    options = {"cache": str(tmp_path / "plans")}
    model = Doubling()
    if how == "in place":
        compiled = model
        model.compile(backend="fxpasses", options=options)
    else:
        called = model if how == "module" else (lambda x: x.cos() * 2)
        compiled = torch.compile(called, backend="fxpasses", options=options)
    x = torch.randn(3)
    expected = compiled(x)
    fxpasses.save(compiled, tmp_path / "model.fxp")
    again = called if how == "function" else Doubling()
    loaded = fxpasses.load(tmp_path / "model.fxp", again, trust=True)
    torch.testing.assert_close(loaded(x), expected)
    with pytest.raises(fxpasses.OptionsError, match=r"loaded from .*model\.fxp': copy that file"):
        fxpasses.save(loaded, tmp_path / "again.fxp")
    for no_file in ("", "a\0b", b"model.fxp"):
        with pytest.raises(fxpasses.OptionsError, match="expected a file"):
            fxpasses.save(compiled, no_file)
        with pytest.raises(fxpasses.OptionsError, match="expected a file"):
            fxpasses.load(no_file, again, trust=True)


def test_calls_without_a_plan_are_named(tmp_path):
    """A file without them looks as if all calls were in it."""

    def scaled(x, settings=None):
        return x * 3 if settings is None else x * len(settings)

    torch._dynamo.reset()
    compiled = fxpasses.compile(scaled, cache=tmp_path / "cache")
    x = torch.ones(3)
    compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpasses.save(compiled, tmp_path / "one.fxp")
    for _ in range(2):
        compiled(x, array.array("d", [2.0]))
    with pytest.warns(UserWarning, match=r"calls that had no plan are not in two\.fxp: .*array"):
        fxpasses.save(compiled, tmp_path / "two.fxp")
