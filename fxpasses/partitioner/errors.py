"""Errors of the partitioner."""

__all__ = ["PartitionError", "PartitionOptionError"]


class PartitionError(RuntimeError):
    """A joint graph cannot be split: a value that a pass needs can be neither saved nor computed there.

    Attributes:
        node: name of the node.
        reason: why its value can be neither saved nor computed where it is needed.
        source: the user's source line that created the node, if known.
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
    """An option of the partitioner has an invalid value.

    Attributes:
        option: its name.
        value: its value.
        expected: the accepted values.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"partition option {option}={value!r}: expected {expected}")
