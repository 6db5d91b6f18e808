"""Jobs of several processes on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def job(script, *arguments, processes=2, killed=()):
    """The outcomes that the processes of a job print as JSON; one that ends with a signal or an error fails, but for ranks that kill themselves."""
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
        printed = [rank.communicate(timeout=540)[0] for rank in ranks]
        codes = [-signal.SIGKILL if rank in killed else 0 for rank in range(processes)]
        assert [rank.returncode for rank in ranks] == codes
        return [json.loads(text.splitlines()[-1]) for rank, text in enumerate(printed) if rank not in killed]
    finally:
        for rank in ranks:
            rank.kill()
