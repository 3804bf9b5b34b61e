"""Builds a tokenizer, its special tokens and its chat templates from a GGUF file's metadata."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from lorax_server.errors import ConfigError
from lorax_server.gguf.container import GGUFFile

# Token types in `tokenizer.ggml.token_type`.
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4
SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Metadata fields with end tokens, and names of control tokens that llama.cpp treats as end tokens in every model.
EOS_TOKEN_KEYS = ("eos", "eot", "eom")
EOS_TOKENS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>", "<|endofturn|>", "<|return|>", "[|endofturn|]"),
}

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE_PATTERN = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE_PATTERN}"
)
_QWEN2_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE_PATTERN}"
)
_UPPERCASE_CLASS, _LOWERCASE_CLASS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_PATTERNS = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE_CLASS}{first}{_LOWERCASE_CLASS}{second}" for first, second in ("*+", "+*")
]
_TEKKEN_PATTERN = rf"{'|'.join(_WORD_PATTERNS)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE_PATTERN}"
_GPT4O_PATTERN = "|".join(rf"{word}{_CONTRACTIONS}?" for word in _WORD_PATTERNS)
_GPT4O_PATTERN = rf"{_GPT4O_PATTERN}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE_PATTERN}"
# DeepSeek-V2's pattern lists the letters that have case, except in some scripts.
_DEEPSEEK_SKIPPED_LETTERS = (
    r"\x{560}-\x{588}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}"
    r"\x{10570}-\x{105BF}\x{10D50}-\x{10D85}\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}"
)
_DEEPSEEK_PUNCTUATION = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
_DEEPSEEK_ASIAN_PATTERN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM_PATTERNS = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_DEEPSEEK_SKIPPED_LETTERS}]]+",
    rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
    r"\s+$",
    _DEEPSEEK_ASIAN_PATTERN,
    r"\p{N}",
)
_DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN_PATTERN, r"\p{N}")
_DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_WHITESPACE_PATTERN}",
)


class PreTokenizer(NamedTuple):
    """Splits text into words for a byte-level tokenizer by applying the patterns in order."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # words in the vocabulary become one token, without merges
    adds_bos: bool = False  # unless the file says otherwise


_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_PATTERN))
# By `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion", "granite-docling"), PreTokenizer((_GPT2_PATTERN,))
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "exaone", "minerva-7b", "codeshell"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "midm-2.0"), PreTokenizer((_LLAMA3_PATTERN,), True, True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3_PATTERN,))),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM_PATTERNS),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER_PATTERNS),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3_PATTERNS),
    "glm4": PreTokenizer((_LLAMA3_PATTERN,), True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "megrez"), PreTokenizer((_QWEN2_PATTERN,))),
    "tekken": PreTokenizer((_TEKKEN_PATTERN,), True, True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O_PATTERN,))),
}


class GGUFTokenizer(NamedTuple):
    """A tokenizer, and the content of its `tokenizer_config.json`."""

    backend: Tokenizer
    config: dict[str, Any]
    end_token_ids: list[int]


def make_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer that a file describes. Raise ConfigError for unsupported tokenizers."""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ConfigError(f"{file.path}: the file contains no tokenizer")
    types = file.get_list("tokenizer.ggml.token_type", int, len(tokens))
    model = file.require("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"{file.path}: tokenizer {model[:40]!r} is not supported; use gpt2 or llama")
    special_tokens = dict(_read_special_tokens(file, tokens))
    try:
        if model == "gpt2":
            backend, adds_bos = _make_byte_level(file, tokens)
        else:
            backend, adds_bos = _make_sentencepiece(file, tokens, special_tokens.get("unk_token")), True
    except ConfigError:
        raise
    except Exception as error:  # `tokenizers` raises plain exceptions for invalid vocabularies
        raise ConfigError(f"{file.path}: the tokenizer is invalid: {error}") from error
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL_TOKEN)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN) and token
        ]
    )
    _add_template(file, backend, special_tokens, adds_bos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens,
        "chat_template": _read_chat_templates(file),
    }
    ends = [file.get(f"tokenizer.ggml.{key}_token_id", int) for key in EOS_TOKEN_KEYS]
    ends += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN) and token in EOS_TOKENS
    ]
    return GGUFTokenizer(backend, config, list(dict.fromkeys(each for each in ends if each is not None)))


def _read_special_tokens(file: GGUFFile, tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, key in SPECIAL_TOKEN_KEYS.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError(f"{file.path}: tokenizer.ggml.{key}_token_id = {token_id} is not in the vocabulary")
        yield name, tokens[token_id]


def _add_template(file: GGUFFile, backend: Tokenizer, special_tokens: Mapping[str, str], adds_bos: bool) -> None:
    """Configure the tokenizer to add BOS and EOS tokens."""
    flags = {"bos_token": adds_bos, "eos_token": False}
    added = []
    for name, default in flags.items():
        flag = file.get(f"tokenizer.ggml.add_{name}", bool)
        added.append(special_tokens.get(name) if (default if flag is None else flag) else None)
    before, after = added
    if before is None and after is None:
        return
    template = [*([before] if before else []), "$A", *([after] if after else [])]
    tokens = [(token, backend.token_to_id(token)) for token in dict.fromkeys(filter(None, added))]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def _read_chat_templates(file: GGUFFile) -> list[dict[str, str]]:
    named_templates = {
        name: file.get(f"tokenizer.chat_template.{name}", str)
        for name in file.get_list("tokenizer.chat_templates", str)
    }
    templates = {"default": file.get("tokenizer.chat_template", str), **named_templates}
    return [{"name": name, "template": template} for name, template in templates.items() if template is not None]


# --- Tokenizer models -------------------------------------------------------------------------------------------------


def _make_byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and True if it adds a BOS token by default."""
    name = file.get("tokenizer.ggml.pre", str) or "default"
    if name not in PRE_TOKENIZERS:
        hint = "; convert the model again with a current llama.cpp" if name == "default" else ""
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre = {name[:40]!r} is not supported; use one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}{hint}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [_split_merge(merge) for merge in file.get_list("tokenizer.ggml.merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _make_sentencepiece(file: GGUFFile, tokens: list[str], unknown: str | None) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer. Merges are derived from the vocabulary.

    transformers' tokenizer classes for Llama, Gemma and Phi-3 treat spaces differently.
    """
    architecture = file.require("general.architecture", str)
    is_gemma = architecture.startswith("gemma")
    ranks: dict[str, float]
    if is_gemma:  # tokens of several spaces are stored as plain spaces
        tokens = [token.replace(" ", "▁") if not token.strip(" ") else token for token in tokens]
        ranks = {token: -index for index, token in enumerate(tokens)}  # the scores do not follow the merge order
    else:
        ranks = dict(zip(tokens, file.get_list("tokenizer.ggml.scores", float, len(tokens)), strict=True))
    merges = [_split_merge(merge) for merge in file.get_list("tokenizer.ggml.merges", str)] or _derive_merges(ranks)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_space = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif architecture == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if adds_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    if adds_space and not is_gemma:
        decoding.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _derive_merges(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, best first."""
    ids = {token: index for index, token in enumerate(ranks)}
    merges = []
    for token, rank in ranks.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        splits = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        splits.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(rank, len(left), len(right), left, right) for left, right in splits]
    merges.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in merges]
