"""Graph utilities: aliasing, provenance of nodes, and new nodes that keep metadata.

* ``rewriting``: create, replace and read nodes; ``aliasing``: shared and written memory; ``fresh_outputs``:
  outputs that must own their memory; ``provenance``: where a node comes from
* ``decompositions``: the operators that passes never see; ``onednn``: operators for matmuls by oneDNN
* ``numbers``, ``threads``: running graphs of rare dtypes, and of small values
"""
