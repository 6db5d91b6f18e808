"""One thing is changed between processes, or between calls: a plan that was made before is not used for it."""

import json
from pathlib import Path

import pytest

from tests import children

PROGRAM = Path(__file__).with_name("adversary.py")

HARMLESS = {
    "nothing", "other values of weights", "other memory of weights", "a hook on a parameter",
    # The code that is traced does not name them.
    "a class registered with an abstract one", "a variable of the context", "more that is set back", "a slot that was empty",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversary")
    folder.chmod(0o700)

    def outcome(what, run):
        output = folder / f"{what}.json"
        done = run(PROGRAM, folder, output, what)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(output.read_text())

    assert outcome("compile", children.run) == [1, {}]
    return outcome("check", children.run_fresh)


@pytest.mark.slow
def test_nothing_that_changes_the_result_is_missed(outcomes):
    assert len(outcomes) > 105
    assert [o for o in outcomes if not o["same"]] == []
    used = {(o["change"], o["late"]) for o in outcomes if o["plan"]}
    calls = {("memory shared by the input and a weight", False)}  # nothing is written there
    assert used == calls | {(name, late) for name in HARMLESS for late in (False, True)}


@pytest.mark.slow
def test_a_plan_runs_without_dynamo_and_inductor(outcomes):
    assert outcomes[0] == {
        "change": "nothing", "late": False, "same": True, "plan": True, "loaded": 1, "compilers": [],
    }  # fmt: skip
