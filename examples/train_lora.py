"""Train a LoRA adapter for a GGUF model with PEFT. docs/train-an-adapter.md explains it.

python examples/train_lora.py --data examples/pirate.jsonl --out adapters/pirate
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorax_server.cli.packaged_models import find_local_model

BATCH_SIZE = 4
IGNORED = -100  # label of tokens that are not trained


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return token IDs and labels for a conversation. Only the last message is trained."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt_ids, ids = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (prompt, text))
    return ids, [IGNORED] * len(prompt_ids) + ids[len(prompt_ids) :]


def make_batch(examples: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(ids) for ids, _ in examples)
    rows = {
        "input_ids": [ids + [0] * (length - len(ids)) for ids, _ in examples],
        "attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in examples],
        "labels": [labels + [IGNORED] * (length - len(labels)) for _, labels in examples],
    }
    return {name: torch.tensor(values) for name, values in rows.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="GGUF file, folder with one GGUF file, or smollm2")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: lists of chat messages")
    parser.add_argument("--out", type=Path, required=True, help="new adapter folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    options = parser.parse_args(argv)

    path = find_local_model(options.model)
    assert path is not None, f"{options.model} does not exist"
    path = path if path.is_file() else next(path.glob("*.gguf"))
    torch.manual_seed(0)
    # transformers dequantizes the weights, because PEFT needs floats. The adapter also fits the quantized model.
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    base = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config).train()
    examples = [encode(tokenizer, json.loads(line)) for line in options.data.read_text().splitlines()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    chosen, started = random.Random(0), time.monotonic()
    for step in range(1, options.steps + 1):
        loss = model(**make_batch(chosen.sample(examples, min(BATCH_SIZE, len(examples))))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 10 == 0 or step == options.steps:
            print(
                f"step {step} of {options.steps}: loss {loss.item():.2f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    model.save_pretrained(options.out, save_embedding_layers=False)  # "auto" looks for a config.json


if __name__ == "__main__":
    main()
