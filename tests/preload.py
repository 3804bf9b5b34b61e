"""Common imports of the test processes, done once in the fork server."""

import gc
import os
import re
import socket
import sys
from multiprocessing import context, forkserver, resource_tracker
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling, or importing the compiler, takes longer than a test

import peft  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import lorax_server.build  # noqa: F401

# A forked process also forks its children from here instead of spawning them, e.g. an engine its ranks. Python intends
# this, but does not tell the forked process where this one listens.
context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # type: ignore[attr-defined]
if found := re.search(r"forkserver import main; main\((\d+),", sys.orig_argv[-1]):
    server: Any = forkserver._forkserver
    with socket.socket(fileno=os.dup(int(found[1]))) as listener:
        server._forkserver_address = listener.getsockname()
    server.ensure_running = resource_tracker.ensure_running

gc.collect()
gc.freeze()  # a child neither collects nor copies imported objects
