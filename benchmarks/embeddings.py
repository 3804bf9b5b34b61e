"""Measure embeddings of texts with mixed lengths, and compare with sentence-transformers in the same process.

The model has the shape of BERT-base and random weights. Texts have 8 to 256 tokens. `encode` of sentence-transformers
sorts texts by length and pads batches of 32. `LLM.embed` receives the same texts. With `--adapters`, each text uses one
of several LoRA adapters, which sentence-transformers cannot mix in a batch, so it runs without adapters. Values are the
best of several alternating runs. sentence-transformers must be installed separately.
"""

import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers as t
from harness.report import Record, make_parser, report
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lorax_server.llm import LLM

VOCAB = 30_000
WORDS = [f"w{index}" for index in range(VOCAB)]
SHORTEST, LONGEST = 8, 256
BATCH = 32
CPU_GOAL, GPU_GOAL = 1.5, 2.0
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def save_model(folder: Path, num_adapters: int, is_tiny: bool) -> None:
    """Save a random BERT in the format of sentence-transformers, with adapters."""
    special = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    tokens = special | {word: index + len(special) for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    t.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder / "model")
    config = t.BertConfig(vocab_size=len(tokens), **(TINY if is_tiny else {}))
    model = t.BertModel(config)
    model.save_pretrained(folder / "model")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    described = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "model/modules.json").write_text(json.dumps(described))
    for name in ("1_Pooling", "2_Normalize"):
        (folder / "model" / name).mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "model/1_Pooling/config.json").write_text(json.dumps(pooling))
    tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["query", "value"]))
    factors = [parameter for name, parameter in tuned.named_parameters() if "lora_" in name]
    for index in range(num_adapters):
        for factor in factors:
            torch.nn.init.normal_(factor, std=0.02)
        tuned.save_pretrained(str(folder / f"adapters/{index}"))


def make_texts(count: int) -> list[str]:
    """Return texts whose lengths are spread evenly on a logarithmic scale."""
    generator = random.Random(0)
    lengths = [
        round(math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST)))) - 2 for _ in range(count)
    ]  # without [CLS] and [SEP]
    return [" ".join(generator.choices(WORDS, k=length)) for length in lengths]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the script")
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    texts = make_texts(options.texts)
    goal = CPU_GOAL if options.device == "cpu" else GPU_GOAL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, options.adapters, options.tiny)
        more: dict[str, Any] = {"model_kwargs": {"dtype": getattr(torch, options.dtype)}}
        peer = SentenceTransformer(str(folder / "model"), device=options.device, **more)
        adapters = {str(index): folder / f"adapters/{index}" for index in range(options.adapters)}
        with LLM(folder / "model", adapters, device=options.device, dtype=options.dtype) as llm:
            chosen = [str(index % options.adapters) for index in range(len(texts))] if options.adapters else None
            cases = {
                "theirs": lambda: peer.encode(texts, batch_size=BATCH, show_progress_bar=False),
                "ours": lambda: llm.embed(texts, progress=False),
                "adapters": lambda: llm.embed(texts, adapter=chosen, progress=False),
            }
            similarity = (cases["theirs"]() * cases["ours"]()).sum(1).min()
            times = dict.fromkeys(cases, math.inf)
            for _ in range(options.runs):
                for case, run in cases.items():
                    start = time.perf_counter()
                    run()
                    times[case] = min(times[case], time.perf_counter() - start)
    peer_name = "sentence-transformers at batch 32"
    records = [
        Record("smallest cosine similarity to sentence-transformers", float(similarity), "", "", 0.99999),
        Record("texts/s", len(texts) / times["ours"], "texts/s"),
        Record("speedup", times["theirs"] / times["ours"], "times", peer_name, goal),
        Record(
            f"speedup with {options.adapters} mixed adapters", times["theirs"] / times["adapters"], "times", peer_name
        ),
    ]
    report(records, options.json)


if __name__ == "__main__":
    main()
