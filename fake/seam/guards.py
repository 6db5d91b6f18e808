"""``torch._guards`` and the C++ guard checks: what Dynamo and AOTAutograd know about
the program that they trace."""

from __future__ import annotations

from torch._C._dynamo.guards import TensorGuards
from torch._guards import Guard, TracingContext, tracing
