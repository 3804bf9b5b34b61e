"""Tests for the API process's tokenizer: parity with transformers, and untrusted tokenizer files."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from lorax_server.errors import BusyError, ConfigError, InputError, SourceError
from lorax_server.files.adapter_files import select_tokenizer_files
from lorax_server.files.regular_file import read_stamp
from lorax_server.files.tokenizer_folder import TokenizerFolder
from lorax_server.models.pretrained import eos_token_ids, load_generation_eos
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import ENVIRONMENT_VARIABLES, SandboxTask, TaskError
from lorax_server.text import convert_task, tokenizer
from lorax_server.text.convert_task import CONVERT_TASK
from lorax_server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from lorax_server.text.tokenizer import (
    PLAIN_TOKENIZER_CLASSES,
    TextTokenizer,
    TokenSpan,
    load_own_tokenizer,
    load_tokenizer,
    share_base_tokenizer,
)
from tests.optional import present
from tests.test_imports import imported_by
from tests.text.conversions import HANG, OVERFILL, PATIENT, RECORD
from tests.text.sandbox_workers import find_workers
from tests.text.test_real_tokenizers import REAL_TOKENIZERS
from tests.text.tokenizers import (
    BYTE_KINDS,
    OTHER_KINDS,
    byte_level,
    metaspace,
    random_texts,
    sentencepiece,
    word_piece,
)

BOS, EOS = "<s>", "</s>"
NAMES = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"}
TEXTS = [*random_texts(20, seed=1), "", " ", "<s>a</s> <tool_call> b<unk>", "a <new> b<New>c  <image>", "Hello world\n"]


def save(
    folder: Path, backend: Tokenizer, *, model_type: str | None = None, drop: tuple[str, ...] = (), **config: Any
) -> Path:
    """Save a tokenizer folder with transformers, then change its config."""
    PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    changed = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in changed.items() if key not in drop}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def check_parity(folder: Path, texts: list[str] = TEXTS) -> TextTokenizer:
    ours, wanted = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == wanted(text, add_special_tokens=special)["input_ids"]
            assert [piece.id for piece in ours.tokenize_with_spans(text, special)] == ids
            assert ours.decode(ids) == wanted.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=False) == wanted.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.special_tokens == wanted.special_tokens_map
    assert ours.eos_token_ids == eos_token_ids(wanted)
    assert ours.num_ids == max(wanted.get_vocab().values()) + 1
    special_ids = {i for i, token in wanted.added_tokens_decoder.items() if token.special}
    assert {i for i in range(ours.num_ids) if ours.detokenizer.is_special(i)} == special_ids
    return ours


def list_adapter_files(folder: Path) -> TokenizerFolder:
    """Return an adapter folder whose source lists all tokenizer files."""
    result = [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]
    return TokenizerFolder(folder, {file: read_stamp(folder / file) for file in select_tokenizer_files(result)})


def load_adapter_tokenizer(folder: Path, base: TextTokenizer, base_folder: Path) -> TextTokenizer:
    files = list_adapter_files(folder)
    with closing(InlineSandbox(1)) as sandbox:
        return share_base_tokenizer(files, base, base_folder) or load_own_tokenizer(files, base_folder, sandbox)


@pytest.fixture(autouse=True)
def _patient_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "CONVERT_TASK", PATIENT)


class InlineSandbox(Sandbox):
    """Run conversions in this process, because a sandbox worker would have to import transformers first."""

    conversions: ClassVar[list[tuple[Any, ...]] | None] = None  # their arguments

    def submit(self, task: SandboxTask, *args: Any, tenant: str = "") -> "Future[bytes]":
        assert task.function == CONVERT_TASK.function
        assert self.conversions is not None, "use the fixture `converts`"
        self.conversions.append(args)
        future: Future[bytes] = Future()
        try:
            future.set_result(convert_task.convert(*args))
        except TaskError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(TaskError(f"{type(error).__name__}: {error}"))
        return future


@pytest.fixture
def converts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Convert in this process and collect the conversion arguments."""
    conversions: list[tuple[Any, ...]] = []
    monkeypatch.setattr(InlineSandbox, "conversions", conversions)
    monkeypatch.setattr(tokenizer, "Sandbox", InlineSandbox)
    # A conversion sets process limits and environment variables, which must not outlast the test.
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    for name in ("HOME", "TMPDIR", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return conversions


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(1)) as sandbox:
        yield sandbox


@pytest.fixture
def never_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_conversion(*_: Any) -> None:
        raise AssertionError("the tokenizer is converted")

    monkeypatch.setattr("lorax_server.text.tokenizer._convert_tokenizer", fail_conversion)


# --- The same tokens as transformers ----------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {**BYTE_KINDS, **OTHER_KINDS}
del KINDS["python"]


@pytest.mark.usefixtures("never_converts")
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_types_match_transformers(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    check_parity(save(tmp_path, getattr(made, "tokenizer", made)))


@pytest.mark.usefixtures("never_converts")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek", "mistral"])  # the other two take seconds to build
def test_real_tokenizers_match_transformers(kind: str, tmp_path: Path) -> None:
    check_parity(save(tmp_path, REAL_TOKENIZERS[kind]().tokenizer))


def added(content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    return {"content": content, **off, **flags}


def typed_token(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **added(content, **flags)}


CONFIGS: dict[str, dict[str, Any]] = {
    "new tokens": {"added_tokens_decoder": {"900": added("<b>", special=True), "90": added("<new>", lstrip=True)}},
    "other flags": {"added_tokens_decoder": {"537": added("<tool_call>", special=True, rstrip=True)}},
    "named but not special": {"added_tokens_decoder": {"537": added("<tool_call>")}, "pad_token": "<tool_call>"},
    "named in the file only": {"pad_token": "<tool_call>"},
    "named and nowhere": {"pad_token": "<new>"},
    "named with flags": {"pad_token": typed_token("<new>", lstrip=True, rstrip=True)},
    "named a word": {"pad_token": "the"},
    "extra": {"extra_special_tokens": ["<new>", typed_token("<New>", normalized=True)]},
    "extra by name": {"extra_special_tokens": {"image_token": "<image>"}},
    "additional": {"additional_special_tokens": ["<new>", "<tool_call>"]},
    "both": {"additional_special_tokens": ["<new>"], "extra_special_tokens": ["<New>"]},
    "of its own": {"image_token": "<image>", "boi_token": typed_token("<new>")},
    "null": {"pad_token": None, "additional_special_tokens": None, "extra_special_tokens": None},
    "split": {"split_special_tokens": True},
    "begin and end": {"add_bos_token": True, "add_eos_token": True},
    "cleaning": {"clean_up_tokenization_spaces": True, "add_prefix_space": True, "legacy": False},
    "old class": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "no eos": {"eos_token": None},
}


@pytest.mark.usefixtures("never_converts")
@pytest.mark.parametrize("changes", CONFIGS)
def test_tokenizer_config_options_match_transformers(changes: str, tmp_path: Path) -> None:
    check_parity(save(tmp_path, byte_level().tokenizer, **CONFIGS[changes]))


@pytest.mark.usefixtures("never_converts")
@pytest.mark.parametrize("model_type", [each for each in tokenizer.PLAIN_MODEL_TYPES if each])
def test_plain_model_types_need_no_conversion(model_type: str, tmp_path: Path) -> None:
    assert model_type not in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    check_parity(save(tmp_path, byte_level().tokenizer, model_type=model_type), TEXTS[-5:])


def with_all_settings(backend: Tokenizer) -> Tokenizer:
    """Return a copy with a post-processor, truncation and padding."""
    copy = Tokenizer.from_str(backend.to_str())
    ids = [(name, copy.token_to_id(name)) for name in (BOS, EOS)]
    copy.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} $B", special_tokens=ids
    )
    copy.enable_truncation(4)
    copy.enable_padding(length=32)
    return copy


@pytest.mark.usefixtures("never_converts")
def test_truncation_and_padding_settings_are_ignored(tmp_path: Path) -> None:
    ours = check_parity(save(tmp_path, with_all_settings(byte_level().tokenizer)))
    ids = ours.encode("The quick brown fox jumps over the lazy dog")
    assert len(ids) > 8
    assert (ids[0], ids[-1]) == (ours.token_to_id(BOS), ours.token_to_id(EOS))


def test_token_spans_have_character_offsets(tmp_path: Path) -> None:
    ours = load_tokenizer(save(tmp_path, with_all_settings(byte_level().tokenizer)))
    text = "Größe 日 dog"
    first, *middle, last = ours.tokenize_with_spans(text)
    assert first == TokenSpan(present(ours.token_to_id(BOS)), BOS, 0, 0)
    assert last == TokenSpan(present(ours.token_to_id(EOS)), EOS, 0, 0)
    assert middle == ours.tokenize_with_spans(text, add_special_tokens=False)
    assert middle[-1].text == "Ġdog"
    assert text[middle[-1].start : middle[-1].stop].strip() == "dog"
    assert {at for piece in middle for at in range(piece.start, piece.stop)} == set(range(len(text)))


# --- Files that transformers changes ----------------------------------------------------------------------------------


def save_rebuilt(folder: Path, kind: str) -> Path:
    """Save a folder whose tokenizer class in transformers rebuilds the tokenizer."""
    byte, spm = byte_level().tokenizer, sentencepiece().tokenizer
    kinds: dict[str, tuple[Tokenizer, str | None, dict[str, Any]]] = {
        "llama": (spm, "llama", {"tokenizer_class": "LlamaTokenizerFast"}),
        "llama of bytes": (byte, "llama", {"tokenizer_class": "LlamaTokenizer"}),
        "qwen2": (byte, "qwen2", {}),
        "gpt2": (with_all_settings(byte), "gpt2", {"tokenizer_class": "GPT2TokenizerFast"}),
        "bert": (word_piece(), "bert", {"tokenizer_class": "BertTokenizer"}),
        "t5": (metaspace().tokenizer, "t5", {"tokenizer_class": "T5Tokenizer"}),
        "no class": (byte, "gpt_neox", {"drop": ("tokenizer_class",)}),
        "split": (byte, "phi3", {"split_special_tokens": True}),
        "legacy": (byte, None, {"drop": ("eos_token",)}),
    }
    backend, model_type, changes = kinds[kind]
    save(folder, backend, model_type=model_type, **changes)
    if kind == "legacy":
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": added("<new>", lstrip=True)}))
        (folder / "added_tokens.json").write_text(json.dumps({"<New>": 538}))
    return folder


REBUILT = ("llama", "llama of bytes", "qwen2", "gpt2", "bert", "t5", "no class", "split", "legacy")


@pytest.mark.parametrize("kind", REBUILT)
def test_rebuilt_tokenizers_are_converted(kind: str, tmp_path: Path, converts: list[tuple[Any, ...]]) -> None:
    check_parity(save_rebuilt(tmp_path, kind))
    assert len(converts) == 1


def save_vocab_and_merges(folder: Path) -> Path:
    save(folder, byte_level().tokenizer, model_type="gpt2", tokenizer_class="GPT2Tokenizer")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    (folder / "tokenizer.json").unlink()
    return folder


def test_folder_without_tokenizer_json_is_converted_in_sandbox(tmp_path: Path) -> None:
    folder = save_vocab_and_merges(tmp_path)
    before = sorted(os.listdir(folder))
    check_parity(folder)
    assert sorted(os.listdir(folder)) == before


# --- Conversion limits ------------------------------------------------------------------------------------------------


def test_conversion_error_message_is_truncated(
    tmp_path: Path, converts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TaskError("a" * 9999)

    monkeypatch.setattr(convert_task, "convert", fail)
    with pytest.raises(ConfigError, match=r"cannot be converted: a{500}$") as raised:
        load_tokenizer(save_vocab_and_merges(tmp_path))
    assert str(raised.value).startswith(f"{tmp_path}: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (PATIENT._replace(cpu_s=0.05), r"takes longer than 0\.05 s$"),  # importing transformers takes more
        (OVERFILL, "[Ff]ile too large"),
    ],
)
def test_conversion_limits_cpu_time_and_file_size(
    task: SandboxTask, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "CONVERT_TASK", task)
    with pytest.raises(ConfigError, match=f"the tokenizer cannot be converted: .*{reason}"):
        load_tokenizer(save_vocab_and_merges(tmp_path))


def test_hanging_conversion_raises_busy_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "CONVERT_TASK", HANG._replace(wall_s=0.1))
    with pytest.raises(BusyError, match=r"took more than 0\.1 s"):
        load_tokenizer(save_vocab_and_merges(tmp_path))


@pytest.mark.slow
def test_conversion_environment_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HOME", "/home/of/the/server")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    monkeypatch.setattr(tokenizer, "CONVERT_TASK", RECORD)
    with pytest.raises(ConfigError, match="recorded"):
        load_tokenizer(save_vocab_and_merges(tmp_path))
    seen = json.loads((tmp_path / "seen.json").read_text())
    environment = seen["environment"]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["LD_LIBRARY_PATH"] == "/opt/lib"
    assert environment["HOME"] == environment["TMPDIR"] == seen["out"]
    assert "HF_TOKEN" not in environment
    assert seen["limits"] == {"RLIMIT_FSIZE": [convert_task.MAX_FILE_BYTES] * 2, "RLIMIT_CORE": [0, 0]}
    ours = {"HF_HUB_OFFLINE", "TIKTOKEN_CACHE_DIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HOME", "TMPDIR"}
    assert {name for name, value in environment.items() if os.environ.get(name) == value} <= {
        *ENVIRONMENT_VARIABLES,
        *ours,
    }


def test_closed_sandbox_starts_no_conversion(tmp_path: Path) -> None:
    (sandbox := Sandbox(1)).close()
    with pytest.raises(BusyError, match="the server is stopping"):
        load_own_tokenizer(list_adapter_files(save_vocab_and_merges(tmp_path)), tmp_path, sandbox)


def test_adapter_tokenizer_uses_base_model_config(tmp_path: Path, converts: list[tuple[Any, ...]]) -> None:
    model = save(tmp_path / "model", byte_level().tokenizer, model_type="qwen2")
    folder = save(tmp_path / "adapter", byte_level(500).tokenizer)
    base = load_tokenizer(save(tmp_path / "base", byte_level().tokenizer))
    ours = load_adapter_tokenizer(folder, base, model)
    assert converts[0][-1] == model / "config.json"
    wanted = AutoTokenizer.from_pretrained(save(tmp_path / "wanted", byte_level(500).tokenizer, model_type="qwen2"))
    assert type(wanted).__name__ == "Qwen2Tokenizer"
    assert [ours.encode(text) for text in TEXTS] == [wanted(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "pipeline", "Tokenizer/../x", "", 7, ["LlamaTokenizer"]])
def test_invalid_tokenizer_class_is_rejected_before_conversion(
    name: Any, tmp_path: Path, converts: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(ConfigError, match="is not a tokenizer class"):
        load_tokenizer(save(tmp_path, byte_level().tokenizer, tokenizer_class=name))
    assert not converts


def test_tokenizer_that_differs_from_backend_is_rejected(
    tmp_path: Path, converts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_rebuilt(tmp_path, "gpt2")
    loaded = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(type(loaded), "__call__", lambda *_, **__: {"input_ids": [1]})
    with pytest.raises(ConfigError, match="encodes this text differently than its `tokenizers` backend"):
        load_tokenizer(folder)


def test_missing_sentencepiece_error_names_package(
    tmp_path: Path, converts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    monkeypatch.setattr("lorax_server.text.convert_task.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path)


# --- Invalid text and ids ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain"), byte_level().tokenizer, chat_template="of the base")


@pytest.fixture(scope="module")
def plain(plain_folder: Path) -> TextTokenizer:
    return load_tokenizer(plain_folder)


def test_encode_rejects_lone_surrogates(plain: TextTokenizer) -> None:
    for cut in (plain.encode, plain.tokenize_with_spans):
        with pytest.raises(InputError, match="cannot be tokenized"):
            cut("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 538, 2**32, 2**70, True, "1", None, 1.0])
def test_decode_rejects_invalid_token_ids(token_id: Any, plain: TextTokenizer) -> None:
    with pytest.raises(InputError, match="is not a token"):
        plain.decode([0, token_id])


def test_decode_rejects_unused_token_id(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = TextTokenizer(backend, {}, {})
    assert (ours.num_ids, ours.encode("a b"), ours.eos_token_ids) == (6, [0, 5], frozenset())
    with pytest.raises(InputError, match="3 is not a token"):
        ours.decode([3])


def test_encode_rejects_text_outside_vocabulary() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(InputError, match="cannot be tokenized"):
        TextTokenizer(backend, {}, {}).encode("b")


def test_tokenizer_is_thread_safe(plain: TextTokenizer) -> None:
    wanted = [plain.encode(text) for text in TEXTS]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(text for text, ids in zip(TEXTS, wanted, strict=True) if plain.encode(text) != ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Templates --------------------------------------------------------------------------------------------------------


def oracle_templates(folder: Path) -> dict[str, str]:
    result = AutoTokenizer.from_pretrained(folder).chat_template
    return result if isinstance(result, dict) else {} if result is None else {"default": result}


@pytest.mark.parametrize(
    "in_config", [None, "text", [{"name": "default", "template": "a"}, {"name": "b", "template": "c"}]]
)
@pytest.mark.parametrize(
    "files", [[], ["chat_template.jinja"], ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]]
)
def test_chat_template_files_match_transformers(in_config: Any, files: list[str], tmp_path: Path) -> None:
    save(tmp_path, byte_level().tokenizer, chat_template=in_config)
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(f"von {file} ü\n")
    templates = load_tokenizer(tmp_path).chat_templates
    assert templates == oracle_templates(tmp_path)
    assert len(templates) == (len(files) or (0 if in_config is None else 1 if in_config == "text" else 2))


# --- Adapters that ship some of the files -----------------------------------------------------------------------------


def test_adapter_template_overrides_base_template(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("its own")
    ours = load_adapter_tokenizer(tmp_path, plain, plain_folder)
    assert ours.chat_templates == {"default": "its own"}
    assert ours.special_tokens == plain.special_tokens
    assert ours.encode("Hello dog") == plain.encode("Hello dog")
    assert plain.chat_templates == {"default": "of the base"}


def test_adapter_with_base_vocabulary_shares_it(
    plain: TextTokenizer, plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, byte_level().tokenizer, chat_template="of the adapter", padding_side="left")
    monkeypatch.setattr(tokenizer, "_load_backend", None)  # no file is loaded
    ours = load_adapter_tokenizer(folder, plain, plain_folder)
    assert ours.chat_templates == {"default": "of the adapter"}
    assert ours.encode("Hello dog") == plain.encode("Hello dog")
    assert ours.shares_vocabulary(plain)
    assert ours.detokenizer is plain.detokenizer


def test_identical_adapter_tokenizer_returns_base_tokenizer(
    plain: TextTokenizer, plain_folder: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path, byte_level().tokenizer, chat_template="of the base", padding_side="left")
    assert load_adapter_tokenizer(folder, plain, plain_folder) is plain
    save(tmp_path, byte_level().tokenizer, chat_template="of the base", pad_token=EOS)
    ours = load_adapter_tokenizer(folder, plain, plain_folder)
    assert ours.special_tokens == {**plain.special_tokens, "pad_token": EOS}
    assert "pad_token" not in plain.special_tokens


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        (
            {
                "add_prefix_space": False,
                "clean_up_tokenization_spaces": True,
                "tokenizer_class": PLAIN_TOKENIZER_CLASSES[0],
            },
            True,
        ),
        ({"pad_token": "<tool_call>"}, True),
        ({"split_special_tokens": True}, False),
        ({"extra_special_tokens": ["<new>"]}, False),
        ({"additional_special_tokens": ["<new>"]}, False),
        ({"image_token": "<new>"}, False),
        ({"eos_token": "<tool_call>"}, False),
        ({"added_tokens_decoder": {"90": added("<new>")}}, False),
        ({"tokenizer_class": "GPT2Tokenizer"}, False),
    ],
)
def test_changed_config_prevents_tokenizer_sharing(
    changes: dict[str, Any], is_shared: bool, plain: TextTokenizer, plain_folder: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path, byte_level().tokenizer, **changes)
    shared = share_base_tokenizer(list_adapter_files(folder), plain, plain_folder)
    assert (shared is not None) == is_shared
    if shared is not None:
        wanted = AutoTokenizer.from_pretrained(folder)
        assert [shared.encode(text) for text in TEXTS] == [wanted(text)["input_ids"] for text in TEXTS]


def test_chat_template_is_read_from_separate_config(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", byte_level().tokenizer, chat_template="of the model")
    other = save(tmp_path / "other", byte_level().tokenizer, chat_template="of the file")
    assert load_tokenizer(folder).chat_templates == {"default": "of the model"}
    ours = load_tokenizer(folder, template_config=other / "tokenizer_config.json")
    assert ours.chat_templates == {"default": "of the file"}
    with pytest.raises(ConfigError, match="the file does not exist"):
        load_tokenizer(folder, template_config=tmp_path / "none.json")


def test_adapter_config_overrides_special_tokens(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    decoder = {str(plain.token_to_id(EOS)): added(EOS, special=True)}
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<tool_call>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({BOS: plain.token_to_id(BOS)}))
    ours = load_adapter_tokenizer(tmp_path, plain, plain_folder)
    assert ours.eos_token_ids == {plain.token_to_id("<tool_call>")}
    assert ours.special_tokens == {**plain.special_tokens, "eos_token": "<tool_call>"}
    assert ours.chat_templates == plain.chat_templates


def test_special_tokens_map_overrides_special_tokens(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": added("<tool_call>"), "pad_token": EOS}))
    ours = load_adapter_tokenizer(tmp_path, plain, plain_folder)
    assert ours.eos_token_ids == {plain.token_to_id("<tool_call>")}
    assert ours.special_tokens["pad_token"] == EOS


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"538": added("<|im_end|>")}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": added(EOS)}}),
        ("added_tokens.json", {"<|im_end|>": 538}),
        ("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
    ],
)
def test_adapter_with_new_tokens_needs_tokenizer_json(
    file: str, content: Any, plain: TextTokenizer, plain_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"include tokenizer\.json"):
        load_adapter_tokenizer(tmp_path, plain, plain_folder)


def test_adapter_vocabulary_replaces_base_vocabulary(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_str(byte_level().tokenizer.to_str())
    backend.add_tokens([AddedToken("<New>", normalized=False)])
    ours = load_adapter_tokenizer(save(tmp_path, backend), plain, plain_folder)
    assert ours.num_ids == plain.num_ids + 1
    assert ours.chat_templates == {}
    assert not ours.shares_vocabulary(plain)


def test_adapter_decoder_with_regex_is_rejected(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_str(byte_level().tokenizer.to_str())
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace('"Regex":', "")])
    load_adapter_tokenizer(save(tmp_path, backend), plain, plain_folder)
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(a+)+b"), "")])
    with pytest.raises(ConfigError, match="decoder must not contain a regular expression"):
        load_adapter_tokenizer(save(tmp_path, backend), plain, plain_folder)


# --- Malformed files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"model_max_length": Infinity}',
        b'{"bos_token": 7}',
        b'{"bos_token": {"content": 7}}',
        b'{"bos_token": ["<s>"]}',
        b'{"added_tokens_decoder": [1]}',
        b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
        b'{"added_tokens_decoder": {"1": "a"}}',
        b'{"added_tokens_decoder": {"1": {"content": "a", "special": 1}}}',
        b'{"bos_token": "\\ud800"}',
        b'{"chat_template": 7}',
        b'{"chat_template": ["a"]}',
        b'{"chat_template": [{"name": "a"}]}',
        b'{"extra_special_tokens": 7}',
        b'{"extra_special_tokens": [7]}',
        b'{"extra_special_tokens": {"a": 7}}',
    ],
)
@pytest.mark.usefixtures("never_converts")
def test_malformed_tokenizer_config_is_rejected(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, byte_level().tokenizer)
    if content.startswith(b'{"') and b'a": 2' not in content:
        content = b'{"tokenizer_class": "TokenizersBackend", ' + content[1:]
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}}',
        b'{"version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": '
        b'{"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    ],
)
@pytest.mark.usefixtures("never_converts")
def test_malformed_tokenizer_json_is_rejected(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, byte_level().tokenizer)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
@pytest.mark.parametrize("file_type", ["huge", "folder", "pipe"])
@pytest.mark.usefixtures("never_converts")
def test_oversized_or_irregular_file_is_rejected(file: str, file_type: str, tmp_path: Path) -> None:
    path = save(tmp_path, byte_level().tokenizer) / file
    path.unlink(missing_ok=True)
    if file_type == "folder":
        path.mkdir()
    elif file_type == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 2**26 + 1)
    with pytest.raises(ConfigError, match=file):
        load_tokenizer(tmp_path)


def test_oversized_vocabulary_is_not_converted(tmp_path: Path, converts: list[tuple[Any, ...]]) -> None:
    (tmp_path / "tokenizer.model").touch()
    os.truncate(tmp_path / "tokenizer.model", 2**26 + 1)
    with pytest.raises(ConfigError, match=r"tokenizer\.model: has"):
        load_tokenizer(tmp_path)
    assert not converts


def test_oversized_adapter_tokenizer_files_are_not_read(
    tmp_path: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, size in (("tokenizer.model", 2**26), ("spiece.model", 2**26), ("vocab.txt", 1)):
        (tmp_path / file).touch()
        os.truncate(tmp_path / file, size)
    monkeypatch.setattr(TokenizerFolder, "read", lambda *_: pytest.fail("a file is read"))
    with pytest.raises(ConfigError, match="can be converted"):
        load_own_tokenizer(list_adapter_files(tmp_path), tmp_path, sandbox)
    assert not find_workers()


def test_invalid_chat_template_files_are_rejected(plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_adapter_tokenizer(tmp_path, plain, plain_folder)
    (tmp_path / "chat_template.jinja").write_text("a" * (2**20 + 1))
    with pytest.raises(ConfigError, match="at most"):
        load_adapter_tokenizer(tmp_path, plain, plain_folder)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a" * (2**20 + 1)}))
    with pytest.raises(ConfigError, match="more than 1048576 characters"):
        load_adapter_tokenizer(tmp_path, plain, plain_folder)
    (tmp_path / "additional_chat_templates").mkdir()
    for i in range(40):
        (tmp_path / "additional_chat_templates" / f"{i}.jinja").touch()
    with pytest.raises(ConfigError, match="more than 32"):
        load_adapter_tokenizer(tmp_path, plain, plain_folder)


# --- Files that the source has not listed -----------------------------------------------------------------------------


STRAY = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"]
STRAY += ["tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja"]
STRAY += ["additional_chat_templates/default.jinja"]


@pytest.mark.parametrize("file", STRAY)
@pytest.mark.usefixtures("never_converts")
def test_unlisted_adapter_file_is_not_read(file: str, plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("server secrets")
    (tmp_path / "adapter" / file).parent.mkdir(parents=True)
    (tmp_path / "adapter" / file).symlink_to(tmp_path / "secret")
    assert share_base_tokenizer(TokenizerFolder(tmp_path / "adapter", {}), plain, plain_folder) is plain


@pytest.mark.parametrize("kind", ["link", "other bytes", "fifo", "nothing"])
def test_replaced_adapter_file_is_rejected(kind: str, plain: TextTokenizer, plain_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter" / "additional_chat_templates" / "default.jinja"
    path.parent.mkdir(parents=True)
    path.write_text("the listed file")
    (tmp_path / "secret").write_text("server secrets!")
    files = list_adapter_files(tmp_path / "adapter")
    path.unlink()
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "other bytes":
        path.write_text("the listed FILE")
    elif kind == "fifo":
        os.mkfifo(path)  # without a writer
    with pytest.raises(
        SourceError, match=r"^adapter 'adapter': .*/default\.jinja changed after it was resolved; try again"
    ):
        share_base_tokenizer(files, plain, plain_folder)


@pytest.mark.usefixtures("converts")
def test_conversion_sees_only_listed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "adapter", byte_level(500).tokenizer, tokenizer_class="GPT2Tokenizer")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "more.jinja").write_text("a template")
    files = list_adapter_files(folder)
    for stray in ("config.json", "processor_config.json", "tokenizer.1.0.json", "vocab.txt"):
        (folder / stray).symlink_to("/etc/passwd")
    seen: list[set[str]] = []

    def convert(copied: Path, *_: Any) -> None:
        seen.append({str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()})
        assert not any(path.is_symlink() for path in copied.rglob("*"))
        raise TaskError("enough is seen")

    monkeypatch.setattr(convert_task, "convert", convert)
    with pytest.raises(ConfigError, match="enough is seen"):
        load_own_tokenizer(files, tmp_path, InlineSandbox(1))
    assert seen == [{"tokenizer.json", "tokenizer_config.json", "additional_chat_templates/more.jinja"}]


# --- Generation defaults ----------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_missing_generation_config_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_generation_config_sets_defaults(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "typical_p": 1.0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    write(
        tmp_path, generation_config={**settings, "eos_token_id": 7, "transformers_version": "4.1", "bos_token_id": None}
    )
    assert load_generation_defaults(tmp_path) == GenerationDefaults(frozenset([7]), **settings)
    write(tmp_path, generation_config=dict.fromkeys(settings))
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    "generation_eos", [{}, {"eos_token_id": None}, {"eos_token_id": -1}, {"eos_token_id": [9, 8, 9]}]
)
@pytest.mark.parametrize("model_eos", [{}, {"eos_token_id": None}, {"eos_token_id": 5}, {"eos_token_id": [5, -1]}])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_eos_token_ids_match_transformers(generation_eos: Any, model_eos: Any, model_type: str, tmp_path: Path) -> None:
    write(tmp_path, generation_config=generation_eos, config={"model_type": model_type, **model_eos})
    wanted = load_generation_eos(str(tmp_path), None) | eos_token_ids(AutoConfig.from_pretrained(tmp_path))
    assert load_generation_defaults(tmp_path).eos_token_ids == wanted


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3"])
def test_default_eos_token_ids_match_transformers(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, config={"model_type": model_type})
    wanted = eos_token_ids(AutoConfig.from_pretrained(tmp_path))
    assert load_generation_defaults(tmp_path).eos_token_ids == wanted


@pytest.mark.parametrize(
    "content",
    [
        {"eos_token_id": "7"},
        {"eos_token_id": [7, None]},
        {"eos_token_id": 7.0},
        {"eos_token_id": True},
        {"eos_token_id": {}},
        {"do_sample": 1},
        {"do_sample": "yes"},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_k": 1.5},
        {"top_k": True},
        {"max_new_tokens": [1]},
        [],
    ],
)
def test_malformed_generation_config_is_rejected(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_generation_defaults(write(tmp_path, generation_config=content))


def test_model_config_may_contain_infinity(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 3, "time_step_limit": [0, float("inf")]})
    assert load_generation_defaults(tmp_path).eos_token_ids == {3}
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"/config\.json"):
        load_generation_defaults(tmp_path)


# --- Imports ----------------------------------------------------------------------------------------------------------


def test_tokenizer_imports_neither_torch_nor_transformers() -> None:
    modules = imported_by("import lorax_server.text.tokenizer, lorax_server.text.chat_template")
    assert "tokenizers" in modules
    assert not modules & {"torch", "numpy", "transformers", "safetensors"}
