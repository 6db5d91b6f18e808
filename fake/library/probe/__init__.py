"""`probe`: derive an operator's fake kernel from its real one.

One concern per file: `experiments` runs the kernel on chosen variations of the samples, `call_facts` reduces
calls to what a fake kernel may see, `candidates` and `solve` propose rules, `derive` keeps those that fit,
and `rule` evaluates and prints them.
"""

from fake.library.probe.rule import FakeRule, UndecidedError
from fake.library.probe.run_probe import probe

__all__ = ["FakeRule", "UndecidedError", "probe"]
