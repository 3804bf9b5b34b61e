"""Import cost. Each test starts a fresh interpreter."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "lorax_server/demo"
# Modules that torch and transformers import themselves on a GPU do not count.
OTHERS = (
    "import torch.distributed\n"
    "from transformers import AutoConfig, LlamaConfig\n"
    "from transformers.activations import ACT2FN\n"
    "from transformers.modeling_outputs import CausalLMOutputWithPast"
)

OURS = {
    "core": (
        "import lorax_server.models, lorax_server.adapters.host, lorax_server.adapters.merge, lorax_server.kernels\n"
        "import lorax_server.weights, lorax_server.worker.adapter_memory, lorax_server.engine.engine\n"
        "from lorax_server.model_types import MODEL_CLASSES\n"
        "from lorax_server.models.registry import find_model_class\n"
        "for model_type in MODEL_CLASSES: find_model_class(model_type)"
    ),
    "script": "import lorax_server.llm",
}


@cache
def imported_by(statement: str) -> frozenset[str]:
    return frozenset(run(f"import sys\n{statement}\nprint(*sorted(sys.modules))").split())


@cache
def find_additional_imports() -> dict[str, frozenset[str]]:
    """Return the modules that each of ours imports beyond torch and transformers."""
    code = f"import os, sys\n{OTHERS}\nbefore = set(sys.modules)\nfor name, statement in {OURS!r}.items():\n"
    code += "    child = os.fork()\n    if not child:\n        exec(statement)\n"
    code += "        print(name, *sorted(set(sys.modules) - before), flush=True)\n        os._exit(0)\n"
    code += "    assert os.waitpid(child, 0)[1] == 0\n"
    return {name: frozenset(modules) for name, *modules in map(str.split, run(code).splitlines())}


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_package_import_does_not_load_torch() -> None:
    modules = imported_by("import lorax_server")
    assert "lorax_server" in modules
    assert not modules & {"torch", "numpy", "transformers", "safetensors"}


def test_config_and_errors_import_does_not_load_torch() -> None:
    modules = imported_by("import lorax_server.config, lorax_server.errors")
    assert not modules & {"torch", "numpy", "transformers", "safetensors"}


def test_adapter_sources_do_not_import_torch() -> None:
    modules = imported_by(
        "import lorax_server.adapters.config, lorax_server.adapters.checkpoint, lorax_server.adapters.identity\n"
        "import lorax_server.adapters.sources.source, lorax_server.adapters.sources.local\n"
        "import lorax_server.adapters.sources.hub, lorax_server.adapters.sources.s3, lorax_server.engine.adapters.space"
    )
    assert "lorax_server.adapters.sources.hub" in modules
    assert not modules & {"torch", "numpy", "transformers", "safetensors", "boto3"}


def test_engine_starts_before_fastapi_import() -> None:
    modules = imported_by("import lorax_server.cli.command, lorax_server.launch, lorax_server.server.run")
    assert "lorax_server.server.service" in modules
    assert not modules & {"fastapi", "pydantic", "torch", "numpy", "transformers"}


@pytest.mark.slow
def test_core_has_no_server_imports() -> None:
    modules = find_additional_imports()["core"]
    assert "lorax_server.layers.linear" in modules
    assert not modules & {"fastapi", "uvicorn", "msgspec", "zmq", "google.protobuf", "triton", "peft"}


@pytest.mark.slow
def test_second_start_does_not_import_transformers_or_compiler() -> None:
    """Importing either takes seconds. The first start caches the model config."""
    start = "import sys\nfrom lorax_server.llm import LLM\n"
    start += (
        f"with LLM({str(DEMO / 'model')!r}, {str(DEMO / 'adapters')!r}, max_num_seqs=2) as llm: llm.generate('hello')\n"
    )
    run(start)
    names = ("torch", "transformers", "torch._dynamo")
    result = run(start + f"print([name for name in {names} if name in sys.modules])")
    assert result.splitlines()[-1] == "['torch']"


@pytest.mark.slow
def test_llm_has_no_server_imports() -> None:
    modules = find_additional_imports()["script"]
    assert "lorax_server.llm" in modules
    assert not modules & {"fastapi", "uvicorn", "msgspec", "zmq", "google.protobuf", "triton", "peft", "boto3"}
    assert not modules & {
        "lorax_server.engine.remote.channel",
        "lorax_server.engine.remote.remote_engine",
        "lorax_server.launch",
    }
