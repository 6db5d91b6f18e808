"""Changes to how Dynamo traces a function for this backend, before the backend is called.

Tracing is the part of ``torch.compile`` whose time grows with every layer of a model. :mod:`.tracing` puts it on
``fake``'s dispatch cache, and :mod:`.replay` copies what Dynamo found in a module for the next one like it (:mod:`.traces`
says when, :mod:`.copies` how). Compilations for other backends are left as they are.
"""

from fxpasses.dynamo.tracing import around_compilations, warn_of_torch

__all__ = ["around_compilations", "warn_of_torch"]
