"""Tuned programs: measure the passes and options of a graph, check them against eager, and keep the best.

::

    first call of a graph ── proposals (what would change it, the most promising first)
        each: compile ── duel with the best so far ── compare with eager ── exact verdict ── keep, or not
    best ── duel with the default ── kept on disk for later processes, with the ledger of what was tried
"""
