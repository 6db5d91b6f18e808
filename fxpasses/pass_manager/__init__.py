"""Passes and their contracts, the order in which they run, running them, and the structure check after each.

* ``pass_base``: passes, contracts and checks; ``groups``: passes that run until nothing changes;
  ``specification``: passes written as text
* ``ordering``: the order of passes; ``manager``: running them; ``runs``: the record of a run
* ``structure``: the structure check, with ``memory`` (stale reads) and ``node_metadata`` (fake values)
* ``sites``: match sites; ``limits``: the switches of a bisection
* ``identity``, ``code_objects``: what determines a pass, for the keys of compile caches
"""
