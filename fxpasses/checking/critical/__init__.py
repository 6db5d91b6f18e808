"""Critical values: inputs of the changed part of a graph that expose differences which few inputs show.

``critical_values`` and ``critical_inputs`` collect them; each other file finds one kind, or says which values of a
graph may be any number (``free_values``, ``given_values``).
"""
