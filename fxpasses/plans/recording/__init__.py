"""Recording: makes a plan of what Dynamo, AOTAutograd and Inductor produce in one call, or says why not.

``recording`` goes through it; ``generated`` writes the code of a plan. The seam files read torch's own records:
``_torch_compiled`` what was compiled, ``_torch_constants`` and ``_torch_effects`` what the trace relied on and
changed, ``_torch_facts`` the steps around the graphs.
"""
