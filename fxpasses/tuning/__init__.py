"""Tuned programs: passes and options of a graph chosen by measuring it, checked against eager, and kept for later processes.

::

    first call of a graph ── proposals (what changes it, the most promising first)
        each: compile ── duel with the best so far ── compare with eager ── ask for the exact verdict ── keep, or not
    best ── duel with the default ── kept on disk, with the ledger of what was tried
"""
