"""Tokenizers that produce the same tokens as transformers, without importing it.

If transformers would load `tokenizer.json` unchanged, this module loads it directly. Tokenizer classes that rebuild the
tokenizer, and other vocabulary formats, are converted by transformers in the sandbox (`convert_task`).
"""

import copy
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from lorax_server.errors import ConfigError, InputError
from lorax_server.files.adapter_files import MAX_TEMPLATE_BYTES, MAX_TEMPLATES, OTHER_VOCABULARY_FILES, TOKENIZER_FILES
from lorax_server.files.names import (
    ADDED_TOKENS_FILE,
    GGUF_FILE_LIST,
    MODEL_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    VOCABULARY_FILE,
)
from lorax_server.files.tokenizer_folder import TokenizerFolder, read_json
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import TaskError, TaskKilledError
from lorax_server.text.config_tokens import add_config_tokens, read_added_tokens, read_named_tokens
from lorax_server.text.convert_task import CONVERT_TASK
from lorax_server.text.detokenizer import Detokenizer, make_detokenizer
from lorax_server.text.token_length import max_token_characters
from lorax_server.text.token_table import make_token_table
from lorax_server.types import TokenTable

VOCABULARY_FILES = (VOCABULARY_FILE, *OTHER_VOCABULARY_FILES)

# Tokenizer classes that load `tokenizer.json` unchanged, and model types for which transformers uses these classes.
PLAIN_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
PLAIN_MODEL_TYPES = (
    *(None, "bert", "distilbert", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "llama", "mistral"),
    *("mixtral", "mpnet", "olmo2", "olmoe", "opt", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "smollm3", "stablelm"),
    *("starcoder2", "xlm-roberta"),
)
UNSUPPORTED_SETTINGS = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "gguf_file", "init_inputs")
# transformers looks up this class name and calls its `from_pretrained`.
CLASS_NAME_PATTERN = re.compile(r"\w+Tokenizer(Fast)?|TokenizersBackend|PythonBackend|SentencePieceBackend")
# Settings that do not change tokenization.
NON_TOKEN_SETTINGS = {
    *("chat_template", "model_max_length", "name_or_path", "pad_token", "padding_side", "truncation_side"),
    *("max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "local_files_only", "is_local"),
}
# Settings, besides "..._token", that change tokenization if `tokenizer.json` is loaded unchanged.
TOKEN_SETTINGS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "split_special_tokens")


class TokenSpan(NamedTuple):
    """A token and its character range in the text. The range is empty for special tokens that are added around the
    text.
    """

    id: int
    text: str  # token name in the vocabulary
    start: int
    stop: int


class EncodedText(NamedTuple):
    """The tokens of a text or of a pair of texts."""

    ids: list[int]
    second_start: int = 0  # first token of the second text, if the model distinguishes the texts; else 0
    spans: Sequence[tuple[int, int]] = ()  # character range of each token, on request
    is_special: Sequence[bool] = ()  # for each token, True if it is a special token; only on request


class TextTokenizer:
    """A model or adapter tokenizer. All methods are thread-safe."""

    def __init__(
        self, backend: Tokenizer, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self.special_tokens = special_tokens  # by template variable name
        self.chat_templates = chat_templates  # by name; "default" is the standard template
        self.detokenizer: Detokenizer = make_detokenizer(backend)
        self._table: list[TokenTable] = []  # computed once and shared by all copies
        self._visible_detokenizers: dict[frozenset[int], Detokenizer] = {}  # by visible special tokens
        self.eos_token_ids = self._find_eos_ids()
        self.num_ids = max(backend.get_vocab().values(), default=-1) + 1
        self._max_token_characters = max_token_characters(backend)

    # The backend's batch functions release the GIL, even for one text. `encode` and `decode` do not.

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode_batch([text], add_special_tokens)[0].ids

    def encode_texts(
        self,
        texts: Sequence[str | tuple[str, str]],
        max_tokens: int,
        *,
        truncate: bool = False,
        suffix: str = "",
        with_spans: bool = False,
    ) -> list[EncodedText]:
        """Return the tokens of texts or pairs of texts, with special tokens.

        With `truncate`, only the first `max_tokens` tokens of a longer text are kept; otherwise, longer texts have no
        `spans`. In a pair, the longer text is shortened first. If a text ends with `suffix`, the suffix is kept.
        """
        encoded = []
        for text, whole in zip(texts, self._encode_batch(texts, with_offsets=with_spans), strict=True):
            is_cut = truncate and len(whole) > max_tokens
            encoding = self._truncate(text, max_tokens, suffix) if is_cut else whole
            each = EncodedText(encoding.ids, 0 if isinstance(text, str) else _find_second_text(encoding.type_ids))
            if with_spans and len(encoding) <= max_tokens:  # reading the offsets of a long text holds the GIL
                each = each._replace(spans=encoding.offsets, is_special=list(map(bool, encoding.special_tokens_mask)))
            encoded.append(each)
        return encoded

    def _truncate(self, text: str | tuple[str, str], max_tokens: int, suffix: str) -> Encoding:
        if isinstance(text, str):
            body, end = self._encode_batch(
                [text.removesuffix(suffix), suffix], add_special_tokens=False, with_offsets=True
            )
            body.truncate(max(0, max_tokens - self._backend.num_special_tokens_to_add(False) - len(end.ids)))
            return self._backend.post_process(Encoding.merge([body, end]) if suffix else body)
        parts = self._encode_batch(list(text), add_special_tokens=False)
        budget = max(0, max_tokens - self._backend.num_special_tokens_to_add(True))
        sizes = [len(part.ids) for part in parts]
        short = min(*sizes, budget // 2)
        sizes = [short, budget - short] if sizes[0] <= sizes[1] else [budget - short, short]
        for part, size in zip(parts, sizes, strict=True):
            part.truncate(size)
        return self._backend.post_process(parts[0], parts[1])

    def _encode_batch(
        self, texts: Sequence[Any], add_special_tokens: bool = True, with_offsets: bool = False
    ) -> list[Encoding]:
        encode = self._backend.encode_batch if with_offsets else self._backend.encode_batch_fast
        try:
            return encode(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:  # Rust panics are not subclasses of Exception
            _reraise_critical(error)
            raise InputError(f"the text cannot be tokenized: {error}") from error

    def tokenize_with_spans(self, text: str, add_special_tokens: bool = True) -> list[TokenSpan]:
        (encoding,) = self._encode_batch([text], add_special_tokens, with_offsets=True)
        ids = encoding.ids  # unlike `tokens` and `offsets`, which hold the GIL for 0.3 s with a million tokens
        name_of = {token_id: self._backend.id_to_token(token_id) or "" for token_id in set(ids)}
        spans = [encoding.token_to_chars(position) or (0, 0) for position in range(len(ids))]  # None: not in the text
        return [TokenSpan(token_id, name_of[token_id], *span) for token_id, span in zip(ids, spans, strict=True)]

    def find_token_starts(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the character position at which each token starts.

        This is the end of the previous token, because the space before a word belongs to the word. Tokens that share a
        character start at the same position. Added special tokens have no length.
        """
        starts, end = [], 0
        for piece in self.tokenize_with_spans(text, add_special_tokens):
            starts.append(min(piece.start, end) if piece.start < piece.stop else end)
            end = max(end, piece.stop)
        return starts

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        for token_id in dict.fromkeys(ids) if set(map(type, ids)) <= {int} else ids:
            is_id = type(token_id) is int and 0 <= token_id < self.num_ids
            if not is_id or self._backend.id_to_token(token_id) is None:
                raise InputError(f"{token_id!r} is not a token id; the model has ids 0 to {self.num_ids - 1}")
        return str(self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def min_token_count(self, text: str) -> int:
        """Return a lower bound on the number of tokens from the text length, or 0 if no bound is known."""
        return 0 if self._max_token_characters is None else -(-len(text) // self._max_token_characters)

    def with_overrides(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> "TextTokenizer":
        """Return a tokenizer with the same vocabulary, but with these special token names and chat templates."""
        if special_tokens == self.special_tokens and chat_templates == self.chat_templates:
            return self
        other = copy.copy(self)
        other.special_tokens, other.chat_templates = special_tokens, chat_templates
        other.eos_token_ids = other._find_eos_ids()
        return other

    def with_visible_tokens(self, names: Sequence[str]) -> "TextTokenizer":
        """Return a tokenizer that decodes the named special tokens as text."""
        ids = (self._backend.token_to_id(name) for name in names)
        shown = frozenset(each for each in ids if each is not None and self.detokenizer.is_special(each))
        if not shown:
            return self
        other = copy.copy(self)
        other.detokenizer = self._visible_detokenizers.get(shown) or self.detokenizer.with_visible_tokens(shown)
        self._visible_detokenizers[shown] = other.detokenizer
        return other

    def shares_vocabulary(self, other: "TextTokenizer") -> bool:
        """Return True if both tokenizers share one vocabulary object."""
        return self._backend is other._backend

    def token_table(self) -> TokenTable:
        """Return the vocabulary as bytes. The first call takes about 0.4 s for 129k tokens."""
        if not self._table:
            self._table.append(make_token_table(make_detokenizer(self._backend), self.num_ids))
        return self._table[0]

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _find_eos_ids(self) -> frozenset[int]:
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else self._backend.token_to_id(eos)
        return frozenset() if eos_id is None else frozenset([eos_id])


def _find_second_text(type_ids: list[int]) -> int:
    return type_ids.index(1) if 1 in type_ids else 0


def load_tokenizer(folder: Path, *, template_config: Path | None = None) -> TextTokenizer:
    """Load a model tokenizer. This may take seconds, and starts a process if transformers is needed.

    `template_config` is a tokenizer_config.json whose chat template replaces the chat template in the folder.
    """
    files = TokenizerFolder(folder)
    config = files.read_json(TOKENIZER_CONFIG_FILE) or {}
    templates = _read_templates(files, config)
    if template_config is not None:
        other = read_json(template_config)
        if other is None:
            raise ConfigError(f"{template_config}: the file does not exist")
        templates = _read_templates(TokenizerFolder(template_config.parent), other)
    with closing(Sandbox(1)) as sandbox:
        return TextTokenizer(*_load_backend(files, config, folder / MODEL_CONFIG_FILE, sandbox), templates)


def share_base_tokenizer(files: TokenizerFolder, base: TextTokenizer, base_folder: Path) -> TextTokenizer | None:
    """Return an adapter tokenizer that shares the base model's vocabulary, or None if the vocabularies differ.

    An adapter may include only a template, other special token names, or (as PEFT saves it) a copy of the base model's
    tokenizer. Return `base` if there is no difference.
    """
    config = files.read_json(TOKENIZER_CONFIG_FILE) or {}
    if any(map(files.has, VOCABULARY_FILES)) and not _has_same_tokens(files, config, TokenizerFolder(base_folder)):
        return None
    templates = _read_templates(files, config)
    return base.with_overrides(_read_special_names(base, files, config), templates or base.chat_templates)


def load_own_tokenizer(files: TokenizerFolder, base_folder: Path, sandbox: Sandbox) -> TextTokenizer:
    """Load an adapter tokenizer with its own vocabulary. Tokenizing can be slow, depending on its regex patterns."""
    config = files.read_json(TOKENIZER_CONFIG_FILE) or {}
    templates = _read_templates(files, config)
    backend, special_tokens = _load_backend(files, config, base_folder / MODEL_CONFIG_FILE, sandbox)
    if backend.decoder and b'"Regex":' in backend.decoder.__getstate__():  # decoding runs on the event loop
        path = files.path / VOCABULARY_FILE
        raise ConfigError(f"{path}: an adapter's decoder must not contain a regular expression")
    return TextTokenizer(backend, special_tokens, templates)


def _load_backend(
    files: TokenizerFolder, config: Mapping[str, Any], model_config: Path, sandbox: Sandbox
) -> tuple[Tokenizer, dict[str, str]]:
    model_type = (read_json(model_config) or {}).get("model_type")
    if _is_plain_tokenizer(files, config, model_type):
        backend, special_tokens = _load_plain_tokenizer(files, config)
    else:
        _check_class(files, config)
        backend, special_tokens = _convert_tokenizer(files, model_config, sandbox)
    backend.no_truncation()
    backend.no_padding()
    return backend, special_tokens


def _has_same_tokens(files: TokenizerFolder, config: Mapping[str, Any], base_files: TokenizerFolder) -> bool:
    """Return True if the tokenizers in two folders produce the same tokens for any text."""
    other_config = base_files.read_json(TOKENIZER_CONFIG_FILE) or {}
    model_type = (read_json(base_files.path / MODEL_CONFIG_FILE) or {}).get("model_type")
    keys = {*config, *other_config} - NON_TOKEN_SETTINGS
    if _is_plain_tokenizer(files, config, model_type) and _is_plain_tokenizer(base_files, other_config, model_type):
        keys = {key for key in keys if key in TOKEN_SETTINGS or key.endswith("_token")}
    if any(config.get(key) != other_config.get(key) for key in keys):
        return False
    names = (*VOCABULARY_FILES, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE)
    if any(files.has(name) != base_files.has(name) for name in names):
        return False
    return all(files.read(name) == base_files.read(name) for name in filter(files.has, names))


# --- Files that transformers loads unchanged --------------------------------------------------------------------------


def _is_plain_tokenizer(files: TokenizerFolder, config: Mapping[str, Any], model_type: object) -> bool:
    """Return True if this module can load the folder without transformers."""
    if not files.is_restricted and files.has(GGUF_FILE_LIST):  # written by this server
        return True
    legacy = files.has(SPECIAL_TOKENS_FILE) or files.has(ADDED_TOKENS_FILE)
    return (
        files.has(VOCABULARY_FILE)
        and not files.has("tekken.json")
        and config.get("tokenizer_class") in PLAIN_TOKENIZER_CLASSES
        and model_type in PLAIN_MODEL_TYPES
        and not any(key in config for key in UNSUPPORTED_SETTINGS)
        and ("added_tokens_decoder" in config or not legacy)
    )


def _load_plain_tokenizer(files: TokenizerFolder, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    backend = _make_backend(files.path / VOCABULARY_FILE, files.read(VOCABULARY_FILE))
    try:
        special_tokens = add_config_tokens(backend, config)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{files.path / TOKENIZER_CONFIG_FILE}: {error}") from error
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return backend, special_tokens


# --- Adapters without a vocabulary ------------------------------------------------------------------------------------


def _read_special_names(base: TextTokenizer, files: TokenizerFolder, config: Mapping[str, Any]) -> dict[str, str]:
    """Return an adapter's special token names. Raise ConfigError for tokens that the base model does not have."""
    special_map = {} if "added_tokens_decoder" in config else files.read_json(SPECIAL_TOKENS_FILE) or {}
    ids = files.read_json(ADDED_TOKENS_FILE) or {}
    try:
        ids |= {token.content: token_id for token_id, token in read_added_tokens(config).items()}
        named = read_named_tokens({**config, **special_map})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{files.path / TOKENIZER_CONFIG_FILE}: {error}") from error
    unknown = [token for token, token_id in ids.items() if base.token_to_id(token) != token_id]
    unknown += [token for token in named.values() if base.token_to_id(token) is None]
    if unknown:
        raise ConfigError(
            f"{files.path}: {unknown[0][:64]!r} differs from the base model's tokens; include {VOCABULARY_FILE}"
        )
    return {**base.special_tokens, **named}


# --- Files that only transformers can read ----------------------------------------------------------------------------


def _check_class(files: TokenizerFolder, config: Mapping[str, Any]) -> None:
    name = config.get("tokenizer_class")
    if name is not None and not (isinstance(name, str) and CLASS_NAME_PATTERN.fullmatch(name)):
        raise ConfigError(
            f"{files.path / TOKENIZER_CONFIG_FILE}: tokenizer_class {str(name)[:64]!r} is not a tokenizer class"
        )
    for file in filter(files.has, TOKENIZER_FILES):
        files.check_size(file)


def _convert_tokenizer(
    files: TokenizerFolder, model_config: Path, sandbox: Sandbox
) -> tuple[Tokenizer, dict[str, str]]:
    """Convert a tokenizer with transformers. Return the tokenizer and its named special tokens.

    Adapter files are copied first, because transformers may read any file in the folder.
    """
    with tempfile.TemporaryDirectory(prefix="lorax-tokenizer-") as scratch:
        folder, out = files.path, Path(scratch, "out")
        out.mkdir()
        if files.is_restricted:
            folder = Path(scratch, "adapter")
            folder.mkdir()
            files.copy_to(folder)
        args = folder.absolute(), out, model_config.absolute() if model_config.exists() else None
        try:
            sandbox.submit(CONVERT_TASK, *args, tenant=f"tokenizer {files.path}").result()
        except (TaskError, TaskKilledError) as error:
            raise ConfigError(f"{files.path}: the tokenizer cannot be converted: {str(error)[:500]}") from error
        backend = _make_backend(out / VOCABULARY_FILE, TokenizerFolder(out).read(VOCABULARY_FILE))
        metadata = read_json(out / "converted.json")
    assert metadata is not None
    backend.encode_special_tokens = metadata["split_special_tokens"]
    return backend, metadata["special_tokens"]


# --- Files ------------------------------------------------------------------------------------------------------------


def _make_backend(path: Path, content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # Rust panics are not subclasses of Exception
        _reraise_critical(error)
        raise ConfigError(f"{path}: not a valid tokenizer: {error}") from error


def _reraise_critical(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error


def _read_templates(files: TokenizerFolder, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a map from template name to chat template, read from separate files or else from the config."""
    names = {"default": TEMPLATE_FILE} if files.has(TEMPLATE_FILE) else {}
    names |= {Path(name).stem: name for name in files.list_templates()}
    templates = {key: files.read_template(name) for key, name in names.items()}
    templates = templates or _read_config_templates(files.path, config)
    if len(templates) > MAX_TEMPLATES:
        raise ConfigError(f"{files.path}: more than {MAX_TEMPLATES} chat templates")
    return templates


def _read_config_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    named = value if isinstance(value, dict) else {} if value is None else {"default": value}
    for name, template in named.items():
        if not (isinstance(name, str) and isinstance(template, str)):
            raise ConfigError(f"{folder / TOKENIZER_CONFIG_FILE}: chat_template must be text, or texts by name")
        if len(template) > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"{folder / TOKENIZER_CONFIG_FILE}: a chat template has more than {MAX_TEMPLATE_BYTES} characters"
            )
    return dict(named)
