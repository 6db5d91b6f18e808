"""Sessions: which compiler is enabled on which thread.

* ``session``: the stack behind ``enable``; ``node_sessions``: capture of passes that reach a compiled graph
* ``compilers``: what ``enable`` accepts; ``fallback``: which passes run in eager, and why
* ``walking``: C++'s hook and cache of graphs, which all threads share
* ``traced_hooks``: hooks registered inside a compiled function
* ``explain``, ``log``: reports for users
"""
