"""Run jobs of several processes on one machine."""

import json
import os
import signal
import socket
from pathlib import Path

from tests import children


def job(script, *arguments, processes=2, killed=()):
    """The outcomes that the processes of a job print as JSON; one that ends with a signal or an error fails, but for ranks that kill themselves."""
    done = ended(script, *arguments, processes=processes)
    codes = [-signal.SIGKILL if rank in killed else 0 for rank in range(processes)]
    assert [rank.returncode for rank in done] == codes, [rank.stderr[-3000:] for rank in done]
    return [
        json.loads(rank.stdout.splitlines()[-1]) for number, rank in enumerate(done) if number not in killed
    ]


def ended(script, *arguments, processes=2):
    """The processes of a job, ended: with what they wrote, and their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    surroundings = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    command = [Path(__file__).with_name(script), *arguments]
    ranks = [children.Child(command, env={**surroundings, "RANK": rank}) for rank in range(processes)]
    try:
        return [rank.finish(timeout=540) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
