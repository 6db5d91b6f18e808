"""``torch._guards`` and the checks of guards in C++: what Dynamo and AOTAutograd know of the program that they trace."""

from __future__ import annotations

from torch._C._dynamo.guards import TensorGuards
from torch._guards import Guard, TracingContext, tracing
