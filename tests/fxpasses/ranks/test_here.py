"""The threads of a rank come to their end with it."""

import os
import subprocess
import sys

ENDS_WHILE_IT_BEGINS_TO_ANSWER = """
import datetime, threading
import torch.distributed as dist
from fxpasses.ranks import here

began, own = threading.Event(), here.Process.own

def slowly():
    began.set()
    try:
        here.job_store().wait(["what nobody sets"], datetime.timedelta(seconds=0.5))
    except RuntimeError:
        return own()

here.Process.own = slowly
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
assert began.wait(20)
"""


def test_a_rank_may_end_while_it_begins_to_answer():
    """Its thread was ended inside of C++, and the process with it, by a signal."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", "import fxpasses" + ENDS_WHILE_IT_BEGINS_TO_ANSWER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
