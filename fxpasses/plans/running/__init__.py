"""Plans that run: found in files (``loaded``), held by a model (``walked_model``), checked and called (``plan``).

``runtime`` loads the code and the kernels of a plan; ``forward_alone`` is a plan without a backward pass.
"""
