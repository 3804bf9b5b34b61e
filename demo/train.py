"""Train the demo: a tokenizer, a small Llama and one adapter per skill.

    python -m demo.train                     # write lorax_server/demo: 9 minutes on an H200
    python -m demo.train --only json pirate  # only these adapters, for the existing model

All texts are generated from seeds: two runs on one machine see the same texts in the same order. Weights differ
slightly between machines because GPUs add numbers in different orders.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import ASSISTANT, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, USER, write_documents
from demo.grammar import make_world
from demo.skills import SKILLS, Item, answer_small_talk, cut_short, write_items
from demo.talk import mention_somebody, write_small_talk
from demo.world import World
from lorax_server.cli.demo import DEMO_FOLDER, DEMO_NAME

VOCABULARY, CONTEXT = 2048, 512
HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 256, 8, 4, 2, 768
STEPS, RATE, EXAMPLE_RATE = 8_000, 1.5e-3, 2e-3
HELD_OUT_SEED = 7_000_000
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Size(NamedTuple):
    """Model, corpus and training sizes."""

    shards: int
    documents: int  # of each
    examples: int  # of each skill
    items: int  # that a model is asked when it is done
    batch: int
    steps: int | None = None  # overrides the recipes


FULL, REHEARSAL = Size(200, 4_000, 80_000, 400, 96), Size(1, 300, 60, 1, 1, 2)


@dataclass(frozen=True)
class Run:
    """A training run: its output folder and its device."""

    out: Path
    device: str
    dtype: torch.dtype
    processes: int
    size: Size


@dataclass(frozen=True)
class Recipe:
    """An adapter's config and the length of its training."""

    rank: int
    alpha: int
    steps: int
    more: dict[str, Any] = field(default_factory=dict)

    def config(self) -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=EVERYWHERE,
            lora_dropout=0.0,
            **self.more,
        )


# Longest first, so that no core is idle at the end.
RECIPES = {
    "sql": Recipe(16, 8, 2_000, {"use_rslora": True}),
    "answer": Recipe(32, 64, 2_000),
    "json": Recipe(16, 32, 2_000, {"use_dora": True}),
    "pirate": Recipe(
        rank=8,
        alpha=16,
        steps=2_000,
        more={"rank_pattern": {"v_proj": 24, "down_proj": 32}, "alpha_pattern": {"v_proj": 48, "down_proj": 64}},
    ),
    "redact": Recipe(16, 32, 2_000),
    "sentiment": Recipe(2, 8, 600),
}
# Parts that a skill does not need.
NEEDS_NO_QUESTION = ("sentiment", "json", "pirate", "redact")
NEEDS_NO_NOTE = ("sql", "redact")
SMALL_TALK_EVERY = 19  # examples; a prime, so that it comes in all the ways of `pose`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder for model/ and adapters/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=["base", *RECIPES], help="adapters need a base model")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--float32", action="store_true", help="no bfloat16: for CPUs that are slow at it")
    parser.add_argument("--rehearsal", action="store_true", help="very little of everything, to see that it works")
    given = parser.parse_args()
    dtype = torch.float32 if given.float32 else torch.bfloat16
    run = Run(given.out, given.device, dtype, given.processes, REHEARSAL if given.rehearsal else FULL)
    chosen = given.only or ["base", *RECIPES]
    if "base" in chosen:
        train_base(run)
    names = [name for name in chosen if name != "base"]
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        for name, accuracy in pool.map(train_adapter, [run] * len(names), names):
            print(f"{name}: {accuracy:.1%} of {run.size.items} held-out items", flush=True)


def train_base(run: Run) -> None:
    began, folder, device = time.monotonic(), run.out / "model", run.device
    tokenizer = make_tokenizer(write_documents(0, 5 * run.size.documents))
    tokenizer.save_pretrained(folder)
    with ProcessPoolExecutor(run.processes, get_context("spawn")) as pool:
        tokens = torch.from_numpy(
            np.concatenate(list(pool.map(tokenize_shard, [run] * run.size.shards, range(run.size.shards))))
        )
    tokens = tokens.to(device)
    print(f"base: {len(tokens):,} tokens after {time.monotonic() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    model: Any = make_model(tokenizer)
    model.to(device)
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    places = torch.Generator().manual_seed(0)

    def next_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - CONTEXT, (run.size.batch, 1), generator=places).to(device)
        batch = tokens[starts + torch.arange(CONTEXT, device=device)].long()
        return batch, batch

    descend(model, next_batch, run.size.steps or STEPS, RATE, "base", run.dtype)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    notes = [item.note.text for item in write_items(HELD_OUT_SEED, run.size.items, held_out=True)]
    share = measure(model.float(), tokenizer, "base", [f"Repeat: {note}" for note in notes], notes)
    print(f"base: {share:.1%} of {len(notes)} held-out notes said again word for word", flush=True)
    print(f"base: {time.monotonic() - began:.0f} s in all", flush=True)


def tokenize_shard(run: Run, shard: int) -> np.ndarray:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.out / "model")
    texts = write_documents(1 + shard, run.size.documents)
    return np.concatenate([np.array(ids, dtype=np.int16) for ids in tokenize(tokenizer, texts)])


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize the text without adding special tokens."""
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer. Digits and spaces are separate tokens, so that no number is unknown and a word
    has the same tokens after a space, a quote or at the start. This makes copying easy for a small model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,  # as in what it reads, where one text ends and the next begins
        eos_token=END,
        pad_token=PAD,
        add_bos_token=True,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train_adapter(run: Run, name: str) -> tuple[str, float]:
    """Train an adapter and return its accuracy on unseen items."""
    out, device = run.out, run.device
    if device == "cpu":
        torch.set_num_threads(1)  # one process per core
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "model")
    model: Any = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    model.to(device)
    recipe, seed = RECIPES[name], 1_000_000 * (1 + list(RECIPES).index(name))
    torch.manual_seed(seed)
    model = get_peft_model(model, recipe.config())
    inputs, labels = (each.to(device) for each in tokenize_examples(tokenizer, name, seed, run.size.examples))
    places = torch.Generator().manual_seed(seed)

    def next_batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(inputs), (run.size.batch,), generator=places).to(device)
        return inputs[rows].long(), labels[rows].long()

    descend(model, next_batch, run.size.steps or recipe.steps, EXAMPLE_RATE, name, run.dtype)
    # In the saved dtype, so that the measured weights are the shipped weights.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half().float()
    save_adapter(model, out / "adapters" / name)
    items = write_items(HELD_OUT_SEED, run.size.items, held_out=True)
    return name, measure(model, tokenizer, name, [item.text for item in items], list(map(SKILLS[name], items)))


def save_adapter(model: Any, folder: Path) -> None:
    """Save the adapter without the local model path and without PEFT's README template."""
    state = {name: weight.half() for name, weight in get_peft_model_state_dict(model).items()}
    model.save_pretrained(folder, state_dict=state)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": DEMO_NAME}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "adapter_model.safetensors").chmod(0o644)


def tokenize_examples(tokenizer: PreTrainedTokenizerFast, name: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return padded token rows. Only completion tokens are labels."""
    asked, answered = (tokenize(tokenizer, texts) for texts in zip(*write_examples(name, seed, count), strict=True))
    longest = max(len(question) + len(answer) for question, answer in zip(asked, answered, strict=True))
    width = (longest + 31) // 32 * 32
    inputs = np.full((count, width), tokenizer.pad_token_id, dtype=np.int16)
    labels = np.full((count, width), -100, dtype=np.int16)
    for row, (question, answer) in enumerate(zip(asked, answered, strict=True)):
        length = len(question) + len(answer)
        inputs[row, :length] = question + answer
        labels[row, len(question) : length] = answer
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def write_examples(name: str, seed: int, count: int) -> list[tuple[str, str]]:
    """Write examples for a skill, including some small talk so that the adapter handles it."""
    world, examples = make_world(seed + 1), []
    for place, item in enumerate(write_items(seed, count, held_out=False)):
        if place % SMALL_TALK_EVERY == 0:
            text, answer = write_odd_example(world, name, item)
        else:
            short = shorten(item, name, place)
            text, answer = short.text, SKILLS[name](short)
        examples.append((pose(text, place), answer + END))
    return examples


def write_odd_example(world: World, name: str, item: Item) -> tuple[str, str]:
    """Write an example with small talk, with names in small talk, or with a question about a missing note."""
    if name == "redact" and world.rng.random() < 0.4:
        return mention_somebody(world)
    is_lost = name not in NEEDS_NO_NOTE and world.rng.random() < 0.3
    text = item.question.text if is_lost else write_small_talk(world)
    return text, answer_small_talk(name, text)


def shorten(item: Item, name: str, place: int) -> Item:
    """Sometimes remove the part that the skill does not need."""
    if place % 13 < 2 and name in NEEDS_NO_QUESTION:
        item = cut_short(item)
    if place % 10 < 3 and name in NEEDS_NO_QUESTION:
        return replace(item, between="", question=item.question._replace(text=""))
    if place % 10 > 6 and name in NEEDS_NO_NOTE:
        return replace(item, between="", note=replace(item.note, sentences=()))
    return item


def pose(text: str, place: int) -> str:
    """Format the input as users do: with the chat template, or plain with the tokenizer's `END` prefix."""
    if place % 7 < 4:
        return f"{USER}{text}{END}{ASSISTANT}"
    return END + text + ("", "", "\n", " ")[place % 4]


def descend(
    model: Any,
    next_batch: Callable[[], tuple[Tensor, Tensor]],
    steps: int,
    rate: float,
    name: str,
    dtype: torch.dtype,
) -> None:
    """Train with AdamW, linear warm-up and cosine decay."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = 0.1 if name == "base" else 0.0
    optimizer = torch.optim.AdamW(trained, rate, betas=(0.9, 0.98), weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, steps))
    model.train()

    @torch.compile
    def find_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    began = time.monotonic()
    for step in range(steps):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = find_loss(*next_batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == steps - 1:
            print(f"{name}: step {step} loss {loss.item():.4f} after {time.monotonic() - began:.0f} s", flush=True)
    model.eval()


def pace(step: int, steps: int) -> float:
    """Return the learning rate factor: linear warm-up, then cosine decay."""
    warm_up = min(200, 1 + steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.98 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2


@torch.no_grad()
def measure(
    model: Any, tokenizer: PreTrainedTokenizerFast, name: str, asked: Sequence[str], right: Sequence[str]
) -> float:
    """Return the accuracy without a server, for a quick check. `demo.evaluate` measures over HTTP."""
    tokenizer.padding_side = "left"
    prompts = [f"{USER}{text}{END}{ASSISTANT}" for text in asked]
    inputs = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt").to(model.device)
    found = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    answers = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    wrong = [each for each in zip(asked, right, answers, strict=True) if each[1] != each[2]]
    for text, wanted, answer in wrong[:5]:
        print(json.dumps({"model": name, "asked": text, "right": wanted, "got": answer}), flush=True)
    return 1 - len(wrong) / len(asked)


if __name__ == "__main__":
    main()
