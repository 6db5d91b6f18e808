"""Reports on a compilation: text files, the same as JSON, and one page for a browser.

``files`` observes a compilation and writes its directory; ``record`` is the data, ``text`` the graphs as code.
``page`` (with ``assets``) and ``summary`` show a report, ``against`` compares two, ``advice`` reads one, and
``step_times`` measures steps.
"""
