"""A module of the user's with the name of one of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OURS = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["fake", "compiled_autograd"])
@pytest.mark.parametrize("layout", ["{}.py", "{}/__init__.py"])
def test_who_shadows_a_package_of_ours_is_named(package, layout, tmp_path):
    shadow = tmp_path / layout.format(package)
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("answer = 42\n")
    (tmp_path / "main.py").write_text("import fxpasses\n")
    done = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert f"ShadowedPackageError: 'import {package}' gives {shadow}, which shadows" in last


def test_a_shadow_that_is_loaded_already_is_named(tmp_path):
    (tmp_path / "fake.py").write_text("answer = 42\n")
    program = "import fake; assert fake.answer == 42; import compiled_autograd"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert f"ImportError: 'import fake' gives {tmp_path / 'fake.py'}, which shadows" in done.stderr


def test_a_directory_that_is_no_package_shadows_nothing(tmp_path):
    (tmp_path / "fake").mkdir()
    program = "import fxpasses._companions"
    # On a path, as an ordinary install is: there Python prefers a package to a plain directory. Editable installs are found by a hook
    # that is asked after all paths, so that there the directory would be imported indeed, and is named.
    with_path = os.environ | {"PYTHONPATH": str(OURS)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=with_path
    )
    assert done.returncode == 0, done.stderr
