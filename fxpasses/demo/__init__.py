"""The main job: train a small GPT through the backend, next to eager and to Inductor, and compare.

* ``model.py``: the model
* ``data.py``: its text, the source of Python's standard library
* ``training.py``: the same steps for each contestant
* ``verdict.py``: do they agree, as closely as float32 allows?
* ``show.py``: the tables
"""

from fxpasses.demo.agreement import Verdict, judge
from fxpasses.demo.training import DemoSettings, Run, train

__all__ = ["DemoSettings", "Run", "Verdict", "judge", "train"]
