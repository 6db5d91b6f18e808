"""Identify a rank's process and check if it runs: a killed one cannot tell, the operating system can."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, as identified by others on the same machine.

    Attributes:
        machine: boot id and PID namespace; ``""`` without ``/proc``, when nobody can tell.
        number: the PID.
        started: start time in clock ticks since boot, because PIDs are reused.
    """

    machine: str
    number: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        try:
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
            return cls(machine, os.getpid(), _state(os.getpid())[1])
        except OSError:
            return cls("", os.getpid(), "")

    def has_ended(self) -> bool:
        """Whether the process has ended. False on another machine or without ``/proc``."""
        if not self.machine or self.machine != Process.own().machine:
            return False
        try:
            state, started = _state(self.number)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def _state(number: int) -> tuple[str, str]:
    """Return state and start of a process: fields 3 and 22 of ``/proc/PID/stat`` (proc(5)).

    Field 2, its name, may contain anything.
    """
    fields = (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
