"""Measure perplexity with weights that `--quantize` has quantized, and compare with the unquantized weights.

The text is this repository's documentation, in chunks of 512 tokens. A GGUF model is dequantized first. The peer is the
model with unquantized weights in float32.
"""

import math
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from harness.report import Record, make_parser, report
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorax_server.cli.packaged_models import find_local_model
from lorax_server.gguf.model_folder import list_models
from lorax_server.llm import LLM
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import StopParams

DOCS = Path(__file__).parent.parent / "docs"
CHUNK_TOKENS = 512
METHODS = ("int8", "int4", "fp8", "fp8-dynamic", "bitsandbytes-nf4", "bitsandbytes-fp4")


def dequantize(path: Path, folder: Path) -> Path:
    """Save a GGUF model as float32 safetensors, with its tokenizer."""
    quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = deepcopy(quantized.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # transformers cannot save `quantized`
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


def measure(folder: Path, text: str, num_chunks: int, quantize: str | None) -> float:
    """Return the perplexity of the text."""
    ids = load_tokenizer(folder).encode(text)[: num_chunks * CHUNK_TOKENS]
    chunks = [ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS)]
    with LLM(folder, device="cpu", dtype="float32", quantize=quantize, max_num_seqs=4, cache_bytes=2**28) as llm:
        stop = StopParams(max_new_tokens=1)
        completions = llm.generate(chunks, stop=stop, prompt_logprobs=True, progress=False)
    logprobs = [each for completion in completions for each in completion.prompt_logprobs or ()]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="model folder, GGUF file or smollm2")
    parser.add_argument("--text", type=Path, help="text file, instead of the documentation")
    parser.add_argument("--chunks", type=int, default=16, help="number of chunks")
    options = parser.parse_args()
    found = find_local_model(options.model)
    assert found is not None, f"{options.model} does not exist"
    text = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    with tempfile.TemporaryDirectory() as scratch:
        files = [found] if found.is_file() else list_models(found)
        folder = dequantize(files[0], Path(scratch)) if files else found
        text = options.text.read_text() if options.text else text
        values = {name: measure(folder, text, options.chunks, name) for name in (None, *METHODS)}
    plain = values.pop(None)
    records = [Record("perplexity, float32", plain, "")]
    for name, value in values.items():
        records += [Record(f"perplexity, {name}", value, ""), Record(f"loss, {name}", 100 * (value / plain - 1), "%")]
    report(records, options.json)


if __name__ == "__main__":
    main()
