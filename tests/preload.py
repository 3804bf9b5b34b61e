"""What the processes of tests have in common, imported once by the process that they are forked from."""

from multiprocessing import context

import peft  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import lorax_server.build  # noqa: F401

# An engine's ranks come from the same process as the engine. It would start them with "spawn".
context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # type: ignore[attr-defined]
