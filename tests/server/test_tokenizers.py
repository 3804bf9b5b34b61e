"""Adapter tokenizers: selection, caching, threads, shutdown, and error messages without paths."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken, Tokenizer

from lorax_server.errors import AdapterError, BusyError, ConfigError, SourceError
from lorax_server.files.regular_file import read_stamp
from lorax_server.files.tokenizer_folder import TokenizerFolder
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import TaskError
from lorax_server.server.tokenizers import MAX_INLINE_CHARACTERS, Tokenizers
from lorax_server.text import adapter_tokenizers
from lorax_server.text.adapter_tokenizers import AdapterTokenizers
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer
from lorax_server.types import ResolvedAdapter
from tests.server.access.test_rate_limits import Clock
from tests.text.conversions import HANG
from tests.text.sandbox_workers import find_workers, wait_until_busy
from tests.text.tokenizers import byte_level

CONFIG = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>", "chat_template": "of the base"}
WAIT_S = 120.0  # timeout for events that should happen soon


def save(folder: Path, backend: Tokenizer, **config: Any) -> ResolvedAdapter:
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    return resolved(folder)


def resolved(folder: Path) -> ResolvedAdapter:
    """Return the folder as an adapter source resolves it, with current file stamps."""
    files = tuple(sorted(os.listdir(folder)))
    stamps = tuple(read_stamp(folder / file) for file in files)
    return ResolvedAdapter(folder.name, str(folder), files, tokenizer_stamps=stamps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    save(folder, byte_level().tokenizer)
    return folder


@pytest.fixture(scope="module")
def base(model: Path) -> TextTokenizer:
    return load_tokenizer(model)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokenizers(base: TextTokenizer, model: Path, clock: Clock) -> Tokenizers:
    return Tokenizers(base, model, clock=clock)


@pytest.fixture
def run(tokenizers: Tokenizers) -> Callable[[Awaitable[Any]], Any]:
    def run(work: Awaitable[Any]) -> Any:
        async def whole() -> Any:
            try:
                return await asyncio.wait_for(work, WAIT_S)
            finally:
                await tokenizers.close()

        return asyncio.run(whole())

    return run


def with_base_vocabulary(tmp_path: Path, name: str = "same", **config: Any) -> ResolvedAdapter:
    return save(tmp_path / name, byte_level().tokenizer, **config)


def with_own_vocabulary(tmp_path: Path, name: str = "own", **config: Any) -> ResolvedAdapter:
    backend = Tokenizer.from_str(byte_level().tokenizer.to_str())
    backend.add_tokens([AddedToken("<New>", normalized=False)])
    return save(tmp_path / name, backend, **config)


# --- Selection and caching --------------------------------------------------------------------------------------------


def test_adapter_without_vocabulary_uses_base_tokenizer(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path
) -> None:
    async def work() -> None:
        assert await tokenizers.find(ResolvedAdapter("none")) is base
        assert await tokenizers.find(ResolvedAdapter("none", str(tmp_path))) is base
        assert await tokenizers.find(with_base_vocabulary(tmp_path)) is base
        other = await tokenizers.find(with_base_vocabulary(tmp_path, "other", chat_template="custom"))
        assert other.shares_vocabulary(base)
        assert tokenizers.find_template(other) == "custom"
        assert not (await tokenizers.find(with_own_vocabulary(tmp_path))).shares_vocabulary(base)

    run(work())


def test_changed_tokenizer_file_is_reloaded(tokenizers: Tokenizers, run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        adapter = with_base_vocabulary(tmp_path, chat_template="first")
        assert await tokenizers.find(adapter) is await tokenizers.find(adapter)
        config = CONFIG | {"chat_template": "and then another"}
        (tmp_path / "same" / "tokenizer_config.json").write_text(json.dumps(config))
        assert tokenizers.find_template(await tokenizers.find(resolved(tmp_path / "same"))) == "and then another"

    run(work())


@pytest.fixture
def loads(base: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which folders are loaded. A folder's name determines the fake content."""
    loaded: list[str] = []

    def share(files: TokenizerFolder, *_: Any) -> TextTokenizer | None:
        loaded.append(files.path.name)
        if files.path.name == "damaged":
            raise ConfigError("it is damaged")
        size = {"small": 10, "large": 2**16 + 1}.get(files.path.name.split("-")[0])
        return None if size is None else base.with_overrides({}, {"default": "x" * size})

    monkeypatch.setattr(adapter_tokenizers, "share_base_tokenizer", share)
    monkeypatch.setattr(
        adapter_tokenizers, "load_own_tokenizer", lambda *_: TextTokenizer(byte_level().tokenizer, {}, {})
    )
    return loaded


def with_empty_config(tmp_path: Path, name: str) -> ResolvedAdapter:
    (tmp_path / name).mkdir()
    (tmp_path / name / "tokenizer_config.json").touch()
    return resolved(tmp_path / name)


@pytest.mark.parametrize(("kind", "num_cached"), [("small", 4), ("large", 2), ("own", 2)])
def test_least_recently_used_tokenizer_is_evicted(
    kind: str,
    num_cached: int,
    base: TextTokenizer,
    model: Path,
    loads: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_tokenizers, "MAX_SHARED_TOKENIZERS", 4)
    monkeypatch.setattr(adapter_tokenizers, "MAX_OWN_TOKENIZERS", 2)
    adapters = [with_empty_config(tmp_path, f"{kind}-{i}") for i in range(num_cached + 1)]
    with closing(Sandbox(1)) as sandbox:
        tokenizers = AdapterTokenizers(base, model, sandbox)
        for adapter in adapters[:num_cached]:
            tokenizers.find(adapter)
        tokenizers.find(adapters[0])  # the second adapter is now least recently used
        tokenizers.find(adapters[num_cached])
        tokenizers.find(adapters[0])
        assert len(loads) == num_cached + 1
        tokenizers.find(adapters[1])
        assert loads[-1] == f"{kind}-1"
    assert len(loads) == num_cached + 2


def test_tokenizer_failure_is_cached_for_ten_seconds(
    tokenizers: Tokenizers, run: Any, loads: list[str], clock: Clock, tmp_path: Path
) -> None:
    async def work() -> None:
        adapter = with_empty_config(tmp_path, "damaged")
        for _ in range(3):
            with pytest.raises(AdapterError, match="adapter 'damaged': its tokenizer cannot be used: it is damaged"):
                await tokenizers.find(adapter)
        assert loads == ["damaged"]
        clock.now += 9.9
        with pytest.raises(AdapterError):
            await tokenizers.find(adapter)
        assert loads == ["damaged"]
        clock.now += 0.2
        with pytest.raises(AdapterError):
            await tokenizers.find(adapter)
        assert loads == ["damaged"] * 2

    run(work())


# --- Threads ----------------------------------------------------------------------------------------------------------


class BlockedFunction:
    """Work that blocks until a test releases it."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.num_started = threading.Semaphore(0)
        self.count = 0
        self.threads: set[str] = set()
        self.release = threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self.threads.add(threading.current_thread().name)
        self.num_started.release()
        assert self.release.wait(WAIT_S)
        return self.result

    async def wait_until_started(self, count: int = 1) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.num_started.acquire, timeout=WAIT_S)


def test_concurrent_requests_share_one_tokenizer_load(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = BlockedFunction(base)
    monkeypatch.setattr(adapter_tokenizers, "share_base_tokenizer", stuck)

    async def work() -> None:
        adapter = with_empty_config(tmp_path, "slow")
        first, *others = [asyncio.create_task(tokenizers.find(adapter)) for _ in range(5)]
        await stuck.wait_until_started()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        stuck.release.set()
        assert await asyncio.gather(*others) == [base] * 4
        assert stuck.count == 1

    run(work())


def test_slow_adapter_tokenizer_blocks_only_adapter_tokenizers(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, long = "Hello dog", "Hello dog " * MAX_INLINE_CHARACTERS

    async def work() -> None:
        slow = await tokenizers.find(with_own_vocabulary(tmp_path))
        other = await tokenizers.find(with_own_vocabulary(tmp_path, "other", chat_template="custom"))
        stuck = BlockedFunction([7])
        monkeypatch.setattr(slow, "encode", stuck)
        encoding = [asyncio.create_task(tokenizers.encode(slow, text, True)) for _ in range(3)]
        await stuck.wait_until_started(2)
        encoding[0].cancel()  # its thread is still running
        waiting = asyncio.create_task(tokenizers.encode(other, text, True))
        assert await tokenizers.encode(base, text, True) == base.encode(text)
        assert await tokenizers.encode(base, long, False) == base.encode(long, False)
        assert await tokenizers.find(with_base_vocabulary(tmp_path)) is base
        template_only = await tokenizers.find(with_base_vocabulary(tmp_path, "template", chat_template="custom"))
        assert await tokenizers.encode(template_only, long, True) == base.encode(long)
        assert stuck.count == 2
        assert not waiting.done()
        stuck.release.set()
        assert await waiting == base.encode(text)
        assert await asyncio.gather(*encoding[1:]) == [[7], [7]]
        assert stuck.threads == {"adapter-tokenizer"}

    run(work())


def test_slow_tokenizer_load_blocks_only_adapter_tokenizers(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = BlockedFunction(base)
    monkeypatch.setattr(adapter_tokenizers, "load_own_tokenizer", stuck)

    async def work() -> None:
        slow = [asyncio.create_task(tokenizers.find(with_own_vocabulary(tmp_path, f"slow-{i}"))) for i in range(3)]
        await stuck.wait_until_started(2)
        assert await tokenizers.encode(base, "a " * MAX_INLINE_CHARACTERS, False) == base.encode(
            "a " * MAX_INLINE_CHARACTERS, False
        )
        assert await tokenizers.find(with_base_vocabulary(tmp_path)) is base
        assert stuck.count == 2
        stuck.release.set()
        await asyncio.gather(*slow)

    run(work())


def test_base_tokenizer_runs_inline_only_for_short_texts(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def thread_of(tokenizer: TextTokenizer, text: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", lambda *_: [threading.current_thread().name])
            return str((await tokenizers.encode(tokenizer, text, True))[0])

    async def work() -> None:
        here = threading.current_thread().name
        template_only = await tokenizers.find(with_base_vocabulary(tmp_path, chat_template="custom"))
        for sharing in (base, template_only):
            assert await thread_of(sharing, "a" * MAX_INLINE_CHARACTERS) == here
            assert await thread_of(sharing, "a" * (MAX_INLINE_CHARACTERS + 1)) == "tokenizer"
        assert await thread_of(await tokenizers.find(with_own_vocabulary(tmp_path)), "a") == "adapter-tokenizer"

    run(work())


# --- Shutdown ---------------------------------------------------------------------------------------------------------


def test_closing_kills_hanging_conversion(
    tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorax_server.text.tokenizer.CONVERT_TASK", HANG)

    async def work() -> None:
        slow = asyncio.create_task(tokenizers.find(with_own_vocabulary(tmp_path, tokenizer_class="LlamaTokenizer")))
        while not (workers := find_workers()):
            await asyncio.sleep(0.01)
        await wait_until_busy(workers[0])
        (converting,) = [each for each in threading.enumerate() if each.name == "adapter-tokenizer"]
        await tokenizers.close()
        with pytest.raises(AdapterError, match="the server is shutting down"):
            await slow
        await asyncio.to_thread(converting.join, WAIT_S)
        assert not find_workers()

    run(work())


def test_conversion_timeout_on_busy_machine_is_not_cached(
    tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorax_server.text.tokenizer.CONVERT_TASK", HANG._replace(wall_s=0.1))

    async def work() -> None:
        adapter = with_own_vocabulary(tmp_path, tokenizer_class="LlamaTokenizer")
        for _ in range(2):
            with pytest.raises(BusyError, match="the machine is busy") as raised:
                await tokenizers.find(adapter)
            assert raised.value.retry_after_s is not None

    run(work())


def test_close_does_not_wait_for_stuck_threads(
    base: TextTokenizer, tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = BlockedFunction(base)
    monkeypatch.setattr(adapter_tokenizers, "load_own_tokenizer", stuck)

    async def work() -> list[threading.Thread]:
        slow = [asyncio.create_task(tokenizers.find(with_own_vocabulary(tmp_path, f"slow-{i}"))) for i in range(3)]
        await stuck.wait_until_started(2)
        await tokenizers.close()
        for each in slow:
            with pytest.raises(AdapterError, match="the server is shutting down"):
                await each
        return [each for each in threading.enumerate() if each.name == "adapter-tokenizer"]

    threads = run(work())
    assert [each.daemon for each in threads] == [True, True]  # the process would join other threads at exit
    stuck.release.set()
    for each in threads:
        each.join(WAIT_S)
    assert stuck.count == 2


# --- Error messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer.json", b"{", "cannot be used: tokenizer.json: not a valid tokenizer"),
        ("tokenizer_config.json", b"[]", "cannot be used: tokenizer_config.json: is invalid"),
        ("chat_template.jinja", b"\xff", "cannot be used: chat_template.jinja: is not UTF-8"),
        (
            "added_tokens.json",
            b'{"<x>": 900}',
            "the tokenizer cannot be converted: OSError: no 'config.json' of model </s> in",
        ),
    ],
)
def test_folder_paths_appear_only_in_log(
    file: str,
    content: bytes,
    expected: str,
    tokenizers: Tokenizers,
    model: Path,
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "a folder" / "adapter"
    with_own_vocabulary(folder.parent, "adapter")
    (folder / file).write_bytes(content)
    words = f"OSError: no '{tmp_path}/x/config.json' of {model} </s> in {folder}/tokenizer.model of {folder}"
    failed: Future[bytes] = Future()
    failed.set_exception(TaskError(words))
    monkeypatch.setattr(Sandbox, "submit", lambda *_, **__: failed)
    with caplog.at_level(logging.WARNING), pytest.raises(AdapterError) as raised:
        run(tokenizers.find(resolved(folder)))
    message = str(raised.value)
    assert message.startswith("adapter 'adapter': its tokenizer cannot be used: ")
    assert expected in message
    assert "/" not in message.replace("</s>", "")
    assert str(folder) in caplog.text


@pytest.mark.parametrize("change", ["gone", "replaced"])
def test_file_changed_during_load_is_retryable(tokenizers: Tokenizers, run: Any, tmp_path: Path, change: str) -> None:
    adapter, path = with_own_vocabulary(tmp_path), tmp_path / "own" / "tokenizer.json"
    content = path.read_bytes()

    async def work() -> None:
        path.unlink()
        if change == "replaced":
            path.write_bytes(content + b" ")
        with pytest.raises(SourceError) as raised:
            await tokenizers.find(adapter)
        assert raised.value.status == 503
        assert str(raised.value) == "adapter 'own': tokenizer.json changed after it was resolved; try again"
        path.write_bytes(content)
        await tokenizers.find(resolved(path.parent))

    run(work())


def test_tokenizer_error_message_is_truncated(
    tokenizers: Tokenizers, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tokenizers, "share_base_tokenizer", Mock(side_effect=ConfigError("x" * 10**6)))
    with pytest.raises(AdapterError) as raised:
        run(tokenizers.find(with_empty_config(tmp_path, "adapter")))
    assert len(str(raised.value)) < 600
