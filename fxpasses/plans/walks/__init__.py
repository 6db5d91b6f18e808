"""Walks: what a model and the code that was traced consist of, as a digest, and as a list of what to watch.

``walk`` visits objects and ``reads`` what code reads of others; ``replaced`` finds functions of torch that were
replaced, and ``results`` how a result is built. ``reusable_walks`` and ``written_again`` save a second walk and
a second compilation.
"""
