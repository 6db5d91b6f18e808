"""Compare the graphs before and after a pass: window by window, as functions, and by their rounding.

``values`` compares both sides. Where bits differ, ``same_function`` asks whether they are one function, and
``rounding`` whether the rewrite rounds worse; ``windows`` cuts out what a pass changed, and ``carried`` runs
only that. The others are kinds of differences that are none.
"""
