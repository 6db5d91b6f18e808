"""The seam to torch: private names that several packages use, and the ledger of patches of torch.

* Private names are in modules named after torch's own. A name that only one folder uses is in a
  ``_torch*.py`` of that folder. Each name is written in one file.
* ``patches`` is the ledger. Each entry is added beside what needs it (``LEDGER.add``);
  ``python -m fxpasses doctor --names`` lists them all.
* ``missing`` replaces names that an unknown release of torch lacks, and ``lazy`` imports names on first use.
"""
