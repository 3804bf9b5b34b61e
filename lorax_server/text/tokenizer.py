"""From text to tokens and back, without transformers and with the same tokens.

What `tokenizer.json` and `tokenizer_config.json` say is done here where transformers takes the file as it is. Many of
its classes do not: they build a tokenizer of their own from the file's vocabulary. For these, and for vocabularies in
other formats, transformers itself is asked, in another process (`convert_tokenizer`), for what it makes of them.

An adapter may bring any of the files that its source knows. Nobody vouches for what is in them, so each is read up to
a limit and checked; what else lies in its folder is never read.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from lorax_server.errors import ConfigError, InputError
from lorax_server.files.adapter_files import MAX_TEMPLATE_BYTES, MAX_TEMPLATES, OTHER_VOCABULARIES, TOKENIZER_FILES
from lorax_server.files.names import MODEL_CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, VOCABULARY_FILE
from lorax_server.files.tokenizer_folder import TokenizerFolder, read_bytes, read_json
from lorax_server.text.conversion import Converter
from lorax_server.text.detokenizer import Detokenizer, make_detokenizer
from lorax_server.text.token_reach import has_plain_names, longest_reach

VOCABULARY, CONFIG = VOCABULARY_FILE, TOKENIZER_CONFIG_FILE
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes that take `tokenizer.json` as it is, and the types of model for which transformers believes the name.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
PLAIN_MODEL_TYPES = (None, "gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen3")
ELABORATE = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "gguf_file", "init_inputs")
# transformers calls `from_pretrained` of whatever class it finds by this name.
CLASS_NAME = re.compile(r"\w+Tokenizer(Fast)?|TokenizersBackend|PythonBackend|SentencePieceBackend")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# What of a tokenizer's config says nothing about its tokens.
HARMLESS = {
    *("chat_template", "model_max_length", "name_or_path", "pad_token", "padding_side", "truncation_side"),
    *("max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "local_files_only", "is_local"),
}
# What else says anything about them, besides "..._token", where transformers takes `tokenizer.json` as it is.
TOKEN_SETTINGS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "split_special_tokens")


class Piece(NamedTuple):
    """A token of a text, and which characters of it; none of those that are added around it."""

    id: int
    text: str  # as the vocabulary spells it
    start: int
    stop: int


class TextTokenizer:
    """A model's or an adapter's tokenizer. Any thread may use it."""

    def __init__(
        self, backend: Tokenizer, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self.special_tokens = special_tokens  # by the names that templates know
        self.chat_templates = chat_templates  # by name; "default" is the usual one
        self.detokenizer: Detokenizer = make_detokenizer(backend)
        self.eos_token_ids = self._find_eos()
        self.num_ids = max(backend.get_vocab().values(), default=-1) + 1
        self._reach = longest_reach(backend)
        self._has_plain_names = has_plain_names(backend)

    # What takes long is done by calls that leave Python's lock to others meanwhile. Those for batches do, also for a
    # batch of one; `encode` and `decode` do not.

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encode = partial(self._backend.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        return self._encode(encode).ids

    def pieces(self, text: str, add_special_tokens: bool = True) -> list[Piece]:
        encoding = self._encode(partial(self._backend.encode_batch, [text], add_special_tokens=add_special_tokens))
        ids = encoding.ids
        if self._has_plain_names:  # all names at once, and all offsets, would hold the lock for long
            known = {token_id: str(self._backend.id_to_token(token_id)) for token_id in set(ids)}
            names = [known[token_id] for token_id in ids]
        else:
            names = encoding.tokens
        places = [encoding.token_to_chars(at) or (0, 0) for at in range(len(ids))]  # None: not of the text
        return [Piece(id_, name, *place) for id_, name, place in zip(ids, names, places, strict=True)]

    def locate(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Find where in a text each of its tokens begins: where the one before it ends, since a space before a word is
        the word's. Tokens that share a character begin at it, and those that the text does not have take no room."""
        starts, end = [], 0
        for piece in self.pieces(text, add_special_tokens):
            starts.append(min(piece.start, end) if piece.start < piece.stop else end)
            end = max(end, piece.stop)
        return starts

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        for token_id in dict.fromkeys(ids) if set(map(type, ids)) <= {int} else ids:
            if not self._knows(token_id):
                raise InputError(f"{token_id!r} is not a token of the model; its tokens are 0 to {self.num_ids - 1}")
        return str(self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def count_at_least(self, text: str) -> int:
        """A number of tokens that the text surely has, by its length alone; 0 where nothing is sure."""
        return 0 if self._reach is None else -(-len(text) // self._reach)

    def with_parts(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> "TextTokenizer":
        """The same vocabulary, which is shared, as is all that was made of it."""
        if special_tokens == self.special_tokens and chat_templates == self.chat_templates:
            return self
        other = copy.copy(self)
        other.special_tokens, other.chat_templates = special_tokens, chat_templates
        other.eos_token_ids = other._find_eos()
        return other

    def shares_vocabulary(self, other: "TextTokenizer") -> bool:
        """Whether it is the very same, not only an equal one."""
        return self._backend is other._backend

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _encode(self, encode: Callable[[], list[Encoding]]) -> Encoding:
        try:
            return encode()[0]
        except BaseException as error:  # a panic in Rust is no Exception
            _reraise_unless_ours(error)
            raise InputError(f"the text cannot be made into tokens: {error}") from error

    def _find_eos(self) -> frozenset[int]:
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else self._backend.token_to_id(eos)
        return frozenset() if eos_id is None else frozenset([eos_id])

    def _knows(self, token_id: Any) -> bool:
        is_id = type(token_id) is int and 0 <= token_id < self.num_ids
        return is_id and self._backend.id_to_token(token_id) is not None


def load_tokenizer(folder: Path, *, template_config: Path | None = None) -> TextTokenizer:
    """The tokenizer of a model's folder. It may take seconds, and starts a process where transformers is needed.

    `template_config` is a tokenizer_config.json whose chat template stands in for the folder's own.
    """
    files = TokenizerFolder(folder)
    config = files.read_json(CONFIG) or {}
    templates = _read_templates(files, config)
    if template_config is not None:
        other = read_json(template_config)
        if other is None:
            raise ConfigError(f"{template_config}: there is no such file")
        templates = _read_templates(TokenizerFolder(template_config.parent), other)
    return TextTokenizer(*_load(files, config, folder / MODEL_CONFIG_FILE, Converter()), templates)


def share_base_tokenizer(files: TokenizerFolder, base: TextTokenizer, base_folder: Path) -> TextTokenizer | None:
    """An adapter's tokenizer, if it has the base model's vocabulary. Files are read and compared, nothing is built.

    An adapter may have any part of a tokenizer: only a template, other names for the tokens that there are, or, as
    PEFT's users save it, all of the base model's once more. It is `base` where nothing differs.
    """
    config = files.read_json(CONFIG) or {}
    has_vocabulary = any(map(files.has, (VOCABULARY, *OTHER_VOCABULARIES)))
    if has_vocabulary and not _is_the_same(files, config, TokenizerFolder(base_folder)):
        return None
    templates = _read_templates(files, config)
    return base.with_parts(_names_in(base, files, config), templates or base.chat_templates)


def load_own_tokenizer(files: TokenizerFolder, base_folder: Path, converter: Converter) -> TextTokenizer:
    """An adapter's tokenizer with a vocabulary of its own. Using it may take as long as its patterns make it."""
    config = files.read_json(CONFIG) or {}
    templates = _read_templates(files, config)
    backend, special_tokens = _load(files, config, base_folder / MODEL_CONFIG_FILE, converter)
    if backend.decoder and b'"Regex":' in backend.decoder.__getstate__():  # answers are decoded on the event loop
        raise ConfigError(
            f"{files.path / VOCABULARY}: its decoder has a regular expression, which an adapter's may not"
        )
    return TextTokenizer(backend, special_tokens, templates)


def _load(
    files: TokenizerFolder, config: Mapping[str, Any], model_config: Path, converter: Converter
) -> tuple[Tokenizer, dict[str, str]]:
    model_type = (read_json(model_config) or {}).get("model_type")
    if _is_plain(files, config, model_type):
        backend, special_tokens = _load_plain(files, config)
    else:
        _check_class(files, config)
        backend, special_tokens = _convert(files, model_config, converter)
    backend.no_truncation()
    backend.no_padding()
    return backend, special_tokens


def _is_the_same(files: TokenizerFolder, config: Mapping[str, Any], other: TokenizerFolder) -> bool:
    """Whether two folders make the same tokens of every text."""
    other_config = other.read_json(CONFIG) or {}
    model_type = (read_json(other.path / MODEL_CONFIG_FILE) or {}).get("model_type")
    keys = {*config, *other_config} - HARMLESS
    if _is_plain(files, config, model_type) and _is_plain(other, other_config, model_type):
        keys = {key for key in keys if key in TOKEN_SETTINGS or key.endswith("_token")}
    if any(config.get(key) != other_config.get(key) for key in keys):
        return False
    for name in (VOCABULARY, *OTHER_VOCABULARIES, SPECIAL_MAP, ADDED):
        if files.has(name) != other.has(name) or (files.has(name) and files.read(name) != other.read(name)):
            return False
    return True


# --- As transformers does where it takes the file as it is ------------------------------------------------------------


def _is_plain(files: TokenizerFolder, config: Mapping[str, Any], model_type: object) -> bool:
    """Whether all that transformers does with the folder is done here too."""
    legacy = files.has(SPECIAL_MAP) or files.has(ADDED)
    return (
        files.has(VOCABULARY)
        and not files.has("tekken.json")
        and config.get("tokenizer_class") in PLAIN_CLASSES
        and model_type in PLAIN_MODEL_TYPES
        and not any(key in config for key in ELABORATE)
        and ("added_tokens_decoder" in config or not legacy)
    )


def _load_plain(files: TokenizerFolder, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    backend = _make_backend(files.path / VOCABULARY, files.read(VOCABULARY))
    try:
        named, extra = _named_tokens(config), _extra_tokens(config)
        added = _added_tokens(config) or dict(sorted(backend.get_added_tokens_decoder().items()))
        _add(backend, list(added.values()), named, extra)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{files.path / CONFIG}: {error}") from error
    return backend, {name: _content(token) for name, token in named.items()}


def _add(
    backend: Tokenizer, added: list[AddedToken], named: Mapping[str, str | AddedToken], extra: list[str | AddedToken]
) -> None:
    """Tokens that the file does not have get the next ids; those that it has get the flags that the config gives."""
    names = {_content(token) for token in named.values()}
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *added)}
    for new in (*named.values(), *extra):
        if _content(new) not in known:
            known.add(_content(new))
            added.append(AddedToken(new, special=True) if isinstance(new, str) else new)
    for token in added:
        token.special = token.special or token.content in names
    backend.add_tokens(added)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    """`bos_token` and so on, first the usual ones; also those of a model's own, such as `image_token`."""
    given = {name: config[name] for name in NAMED if config.get(name) is not None}
    own = {key: value for key, value in config.items() if key.endswith("_token") and key not in NAMED}
    for kind in (dict, str):  # in this order new ones get their ids
        given |= {key: value for key, value in own.items() if isinstance(value, kind)}
    extra = config.get("extra_special_tokens")
    given |= extra if isinstance(extra, dict) else {}
    return {name: _to_token(name, value) for name, value in given.items()}


def _extra_tokens(config: Mapping[str, Any]) -> list[str | AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return []
    if not isinstance(extra, list):
        raise TypeError("extra_special_tokens is neither a list nor an object")
    return [_to_token("extra_special_tokens", token) for token in extra]


def _added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """In the order of their ids."""
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise TypeError("added_tokens_decoder is not an object")
    return {int(key): _to_added("added_tokens_decoder", decoder[key]) for key in sorted(decoder, key=int)}


def _to_token(name: str, value: object) -> str | AddedToken:
    return value if isinstance(value, str) else _to_added(name, value)


def _to_added(name: str, value: object) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TypeError(f"{name} holds {str(value)[:64]!r}, not a token")
    flags = {flag: value[flag] for flag in FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise TypeError(f"{name} holds a token whose flags are not true or false")
    return AddedToken(value["content"], **flags)


def _content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)


# --- An adapter that ships no vocabulary ------------------------------------------------------------------------------


def _names_in(base: TextTokenizer, files: TokenizerFolder, config: Mapping[str, Any]) -> dict[str, str]:
    """What the adapter calls the base model's tokens. Tokens that the base does not have need a vocabulary."""
    try:
        given = config if "added_tokens_decoder" in config else {**config, **(files.read_json(SPECIAL_MAP) or {})}
        ids = files.read_json(ADDED) or {}
        ids |= {token.content: token_id for token_id, token in _added_tokens(config).items()}
        named = {name: _content(token) for name, token in _named_tokens(given).items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{files.path / CONFIG}: {error}") from error
    unknown = [token for token, token_id in ids.items() if base.token_to_id(token) != token_id]
    unknown += [token for token in named.values() if base.token_to_id(token) is None]
    if unknown:
        raise ConfigError(
            f"{files.path}: {unknown[0][:64]!r} is not so in the base model's tokens; ship {VOCABULARY} too"
        )
    return {**base.special_tokens, **named}


# --- Whatever only transformers can read ------------------------------------------------------------------------------


def _check_class(files: TokenizerFolder, config: Mapping[str, Any]) -> None:
    name = config.get("tokenizer_class")
    if name is not None and not (isinstance(name, str) and CLASS_NAME.fullmatch(name)):
        raise ConfigError(f"{files.path / CONFIG}: tokenizer_class {str(name)[:64]!r} is not a tokenizer's class")
    for each in filter(files.has, TOKENIZER_FILES):
        files.check(each)


def _convert(files: TokenizerFolder, model_config: Path, converter: Converter) -> tuple[Tokenizer, dict[str, str]]:
    """By transformers, which takes whatever it finds: of an adapter it sees a copy of what may be read."""
    with tempfile.TemporaryDirectory(prefix="lorax-tokenizer-") as made:
        folder, out = files.path, Path(made, "out")
        out.mkdir()
        if files.is_vouched_for:
            folder = Path(made, "adapter")
            folder.mkdir()
            files.copy_to(folder)
        converter.convert(folder, out, model_config if model_config.exists() else None)
        backend, facts = (
            _make_backend(out / VOCABULARY, read_bytes(out / VOCABULARY)),
            read_json(out / "converted.json"),
        )
    assert facts is not None
    backend.encode_special_tokens = facts["split_special_tokens"]
    return backend, facts["special_tokens"]


# --- Files ------------------------------------------------------------------------------------------------------------


def _make_backend(path: Path, content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # a panic in Rust is no Exception
        _reraise_unless_ours(error)
        raise ConfigError(f"{path}: is not a tokenizer: {error}") from error


def _reraise_unless_ours(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error


def _read_templates(files: TokenizerFolder, config: Mapping[str, Any]) -> dict[str, str]:
    """Those in files of their own, or else those in the config."""
    names = {"default": TEMPLATE_FILE} if files.has(TEMPLATE_FILE) else {}
    names |= {Path(name).stem: name for name in files.list_templates()}
    templates = {key: files.read_text(name) for key, name in names.items()} or _templates_in(files.path, config)
    if len(templates) > MAX_TEMPLATES:
        raise ConfigError(f"{files.path}: has more than {MAX_TEMPLATES} chat templates")
    return templates


def _templates_in(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = config.get("chat_template")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        given = {each.get("name"): each.get("template") for each in given}
    named = given if isinstance(given, dict) else {} if given is None else {"default": given}
    for name, template in named.items():
        if not (isinstance(name, str) and isinstance(template, str)):
            raise ConfigError(f"{folder / CONFIG}: chat_template is neither a text nor texts by name")
        if len(template) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{folder / CONFIG}: a chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return dict(named)
