"""Run-time support for captured backward passes: hooks, accumulation, queries.

* ``functional``, ``aot_functional``, ``validation``: what the nodes of a captured graph call
* ``executing``: running a graph without generated code
* ``running``, ``queries``, ``late_hooks``: the passes that run, and what they answer to user code meanwhile
* ``node_order``: the autograd nodes of a pass, in the engine's order
"""
