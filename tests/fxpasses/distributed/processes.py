"""Jobs of several processes on one machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def job(script, *arguments, processes=2):
    """The outcomes that each process of a job prints as JSON; one that ends with a signal or an error fails."""
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
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    ranks = [
        subprocess.Popen(command, env={**surroundings, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    try:
        outcomes = [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * processes
        return outcomes
    finally:
        for rank in ranks:
            rank.kill()
