"""`probe`: derive an operator's fake kernel from its real one.

One concern a file: `experiments` runs the kernel on chosen variations of the samples, `call_facts` reduces calls to what a
fake kernel may see, `shapes`, `solve` and `kinds` propose rules, `derive` keeps those that fit, `rule` answers and
`source` prints. `score` tries it blind on torch's own operators.
"""

from fake.library.probe.rule import FakeRule, UndecidedError
from fake.library.probe.run_probe import probe

__all__ = ["FakeRule", "UndecidedError", "probe"]
