"""Errors that this package raises, with fields that callers can act on."""


class CompiledAutogradError(RuntimeError):
    """Base class of all errors of this package."""


class InvalidCompilerError(CompiledAutogradError, TypeError):
    """``enable`` got something that cannot compile a graph."""

    def __init__(self, compiler: object, problem: str) -> None:
        self.compiler = compiler
        self.problem = problem
        super().__init__(
            f"enable(compiler_fn): {problem}. Pass a function of one GraphModule that returns a callable, "
            "a backend function of (GraphModule, example inputs), or the name of a torch.compile backend."
        )


class RefusedError(CompiledAutogradError, NotImplementedError):
    """A backward pass cannot be captured. With ``config.fallback`` on, it runs in eager instead."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"this backward pass cannot be captured: {reason}. "
            "Set compiled_autograd.config.fallback = True to run such passes in eager."
        )


class StrayPassError(CompiledAutogradError):
    """C++ called the hook of one thread's walk for another thread's pass. That pass is retried."""

    def __init__(self) -> None:
        super().__init__(
            "C++ met a backward pass in another thread than the one that captures; nothing has run yet"
        )


class LateHookError(CompiledAutogradError):
    """User code in a captured pass added a hook to a tensor or node that the pass has yet to reach.

    Attributes:
        node: the autograd node that has yet to run.
        running: the node whose user code adds the hook.
    """

    def __init__(self, node: str, running: str) -> None:
        self.node = node
        self.running = running
        super().__init__(
            f"user code that runs for {running} adds a hook to {node} or a tensor of it, whose turn in this backward pass is "
            "still to come; the pass was captured without it. Add the hook before calling backward, or run this "
            "backward pass inside `with compiled_autograd.disable():`."
        )


class UnboundOperatorError(CompiledAutogradError):
    """A reloaded graph calls an autograd node that this process has not seen yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"torch binds the functional form of {name!r} when a backward pass with that node is first "
            "captured in a process. Capture one such backward pass before you run the reloaded graph."
        )


class GraphReloadError(CompiledAutogradError):
    """A graph cannot be saved to, or loaded from, a file."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")
