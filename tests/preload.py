"""What the processes of tests have in common, imported once by the process that they are forked from."""

import gc
import os
import re
import socket
import sys
from multiprocessing import context, forkserver, resource_tracker
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # it would take longer than any test

import peft  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import lorax_server.build  # noqa: F401

# A process that was forked forks its own from here too, e.g. an engine its ranks, where it would use "spawn". Python
# means it to, but forgets to tell it where this process listens.
context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # type: ignore[attr-defined]
if found := re.search(r"forkserver import main; main\((\d+),", sys.orig_argv[-1]):
    server: Any = forkserver._forkserver
    with socket.socket(fileno=os.dup(int(found[1]))) as listener:
        server._forkserver_address = listener.getsockname()
    server.ensure_running = resource_tracker.ensure_running

gc.collect()
gc.freeze()  # a child neither looks through what was imported nor copies it
