"""Symbolic sizes: environments that explain themselves, minimal guards, contracts, and integers that cost little.

- ``shape_env``: :class:`fake.ShapeEnv`, and how Dynamo and export come to use it;
- ``shape_guards``, ``explain_guards``, ``reasons``, ``terms``: the minimal guards, told in the user's terms with who asked;
- ``ranges``, ``omega``, ``expr``: the proofs that let a guard be dropped;
- ``contract``: :class:`fake.Dim`, promises about sizes, and programs that break them;
- ``unbacked``: sizes that only data decides;
- ``node``: lean symbolic integers, which ``fake.accelerate`` puts in place of torch's hot methods.
"""
