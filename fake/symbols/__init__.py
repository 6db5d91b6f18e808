"""Symbolic sizes: environments that explain themselves, minimal guards, contracts, cheap symbolic integers.

- ``shape_env``: :class:`fake.ShapeEnv`, and how Dynamo and export come to use it;
- ``shape_guards``, ``range_guards``, ``explain_guards``, ``reasons``, ``terms``: guards in the user's
  terms, and who asked;
- ``implications``, ``omega``, ``expr``, ``divisors``, ``enumeration``: the proofs that drop a guard;
- ``contract``: :class:`fake.Dim`, promises about sizes, and programs that break them;
- ``unbacked``: data-dependent sizes;
- ``node``, ``operators``, ``lean_patches``: lean symbolic integers, with which ``fake.accelerate``
  replaces torch's hot methods.
"""
