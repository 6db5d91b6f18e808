"""Errors of the partitioner."""

__all__ = ["PartitionError", "PartitionOptionError"]


class PartitionError(RuntimeError):
    """A joint graph that cannot be split, as a value that one of the passes needs can be had neither way.

    Attributes:
        node: name of the node.
        reason: why its value can be neither saved nor computed where it is needed.
        source: the user's source line that made the node, if it is known.
    """

    def __init__(self, node: str, reason: str, source: str | None = None) -> None:
        self.node = node
        self.reason = reason
        self.source = source
        where = f"\n  traced from: {source}" if source else ""
        super().__init__(
            f"cannot split the joint graph at {node!r}: {reason}.{where}\n"
            "  Take the operation out of the checkpointed or compiled region, or give it an output that can be saved."
        )


class PartitionOptionError(ValueError):
    """An option of the partitioner with a value that it cannot have.

    Attributes:
        option: its name.
        value: of the option.
        expected: the values that it may have.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"partition option {option}={value!r}: expected {expected}")
