import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from lorax_server.cli import demo
from lorax_server.cli.flags import FLAG_GROUPS, FLAGS, Flag, build_parser
from lorax_server.cli.lorax_flags import FLAG_NAMES, VARIABLE_BY_SETTING
from lorax_server.cli.settings import ParsedSettings, parse
from lorax_server.config import CorsConfig, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError

# Section 9.1 of the specification.
LORAX_FLAGS = re.findall(
    r"--[\w-]+",
    """
--model-id --adapter-id --source --default-adapter-source --adapter-source --revision --validation-workers --sharded
--num-shard --quantize --compile --eager --compile-max-batch-size --compile-max-rank --compile-batch-size
--speculative-tokens --speculation-max-batch-size --preloaded-adapter-ids --preloaded-adapter-source
--predibase-api-token --dtype --trust-remote-code --max-concurrent-requests --max-best-of --max-stop-sequences
--max-input-length --max-total-tokens --waiting-served-ratio --max-batch-prefill-tokens --max-batch-total-tokens
--max-waiting-tokens --eager-prefill --chunked-prefill --prefix-caching --merge-adapter-weights --max-active-adapters
--adapter-cycle-time-s --adapter-memory-fraction --hostname --port --shard-uds-path --master-addr --master-port
--huggingface-hub-cache --weights-cache-override --disable-custom-kernels --cuda-memory-fraction --json-output
--otlp-endpoint --cors-allow-origin --cors-allow-header --cors-expose-header --cors-allow-method
--cors-allow-credentials --watermark-gamma --watermark-delta --ngrok --ngrok-authtoken --ngrok-edge --env
--download-only --tokenizer-config-path --backend --embedding-dim --disable-sgmv --memory-wiggle-room
""",
)
SAMPLES = {"text": "x", "integer": "100", "number": "0.5", "size": "4K", "switch": "true", "path": "/x"}
VALID_VALUES = {
    "--speculative-tokens": "8",
    **dict.fromkeys(("--source", "--adapter-source", "--default-adapter-source", "--preloaded-adapter-source"), "hub"),
    "--dtype": "float16", "--quantize": "fp8-kv", "--device": "cpu", "--log-level": "debug", "--watermark-delta": "2",
    "--trust-remote-code": "false", "--sharded": "false", "--cors-allow-credentials": "false",
    "--hostname": "1.2.3.4", "--tool-parser": "hermes", "--api-workers": "1", "--task": "embed", "--pooling": "cls",
}  # fmt: skip


def read(line: str = "", environ: dict[str, str] | None = None, command: str = "serve") -> ParsedSettings:
    words = line.split()
    return parse(words if "--model-id" in words else ["--model-id", "owner/model", *words], environ or {}, command)


def config(line: str = "", environ: dict[str, str] | None = None, device: str = "cpu") -> ServerConfig:
    return read(line, environ).make_config(Path("/model"), device)


# --- the table


def test_all_lorax_flags_are_accepted() -> None:
    assert set(LORAX_FLAGS) == {flag.name for flag in FLAGS if not flag.has_env_prefix}


SETTINGS = (ModelConfig, SourceConfig, EngineConfig, CorsConfig, ServerConfig)
NO_FLAG = {
    "path": "the folder of --model-id, fetched or not",
    "model_id": "--model-id, which has another default for each command",
    "hub_token": "a secret: HF_TOKEN and the like, with --use-global-hf-token",
    "replica_secret": "a secret that the processes of a Ray deployment share",
    "tenant_weights": "`weight` of the keys in --keys-file",
    **dict.fromkeys(("model", "sources", "engine", "cors"), "settings of their own"),
}


def test_all_settings_have_flags_or_exceptions() -> None:
    names = [field.name for settings in SETTINGS for field in fields(settings)]
    assert len(set(names)) == len(names), "a field is known by its name alone"
    flagged = [flag.field for flag in FLAGS if flag.field]
    assert len(set(flagged)) == len(flagged)
    assert set(flagged) == set(names) - NO_FLAG.keys()
    assert {*FLAG_NAMES, *VARIABLE_BY_SETTING} <= set(flagged)


def test_flag_help_works_without_docstrings() -> None:
    """Python may run with -OO."""
    for flag in filter(lambda flag: flag.field, FLAGS):
        assert flag.help
    code = "from lorax_server.cli.flags import FLAGS; print(*(flag.help for flag in FLAGS), sep='\\n')"
    shown = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [flag.help for flag in FLAGS]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("--max-waiting", "integer"),
        ("--max-wait-s", "number"),
        ("--max-adapter-file-bytes", "size"),
        ("--playground-examples", "path"),
    ],
)
def test_flag_value_types_follow_field_types(name: str, kind: str) -> None:
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    assert (flag.kind, flag.has_env_prefix, flag.is_repeatable) == (kind, True, False)


def test_flag_names_and_variables_are_unique() -> None:
    names = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    variables = [name for flag in FLAGS for name in flag.variables]
    assert len(set(names)) == len(names)
    assert len(set(variables)) == len(variables)


@pytest.mark.parametrize(
    ("flag", "alias"), [(flag, alias) for flag in FLAGS for alias in flag.aliases], ids=lambda value: str(value)[:40]
)
def test_deprecated_flag_names_are_accepted(flag: Flag, alias: str) -> None:
    expected = read(f"{flag.name} 3").values
    assert (
        read(f"{alias} 3").values == read("", {f"LORAX_{alias[2:].upper().replace('-', '_')}": "3"}).values == expected
    )
    assert alias not in build_parser("serve").format_help()


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
@pytest.mark.parametrize("command", ["serve", "launcher"])
def test_all_flags_can_be_set(flag: Flag, command: str) -> None:
    """A flag and its environment variable have the same effect: a warning, or a new field value."""
    text = VALID_VALUES.get(flag.name, SAMPLES[flag.kind])
    base = [] if flag.name == "--model-id" else ["--model-id", "owner/model"]
    parsed = parse([*base, flag.name, text], {}, command)
    assert bool(parsed.warnings) == bool(flag.ignored_reason)
    assert all(flag.ignored_reason in warning for warning in parsed.warnings)
    if flag.variables:
        assert parse(base, {flag.variables[0]: text}, command).values == parsed.values
    if flag.settings and flag.field not in ("static_adapter", "preload"):  # these become pairs with a source
        made = parsed.make_config(Path("/model"))
        settings = {ModelConfig: made.engine.model, EngineConfig: made.engine, SourceConfig: made.engine.sources}
        owner = (settings | {CorsConfig: made.cors}).get(flag.settings, made)
        assert getattr(owner, flag.field) == parsed.values[flag.key]


def test_defaults_match_settings_classes() -> None:
    made = config()
    assert made == ServerConfig(
        EngineConfig(
            ModelConfig(Path("/model")),
            sources=SourceConfig(hub=True, cache=Path.home() / ".cache/lorax"),
        ),
        "owner/model",
    )


def test_only_launcher_allows_all_origins_and_hosts_by_default() -> None:
    """LoRAX allows all origins. On a laptop, this would let any web page use the model."""
    served, launched = (read(command=command).make_config(Path("/model")) for command in ("serve", "launcher"))
    assert (served.cors.allow_origins, served.allowed_hosts) == ((), ())
    assert (launched.cors.allow_origins, launched.allowed_hosts) == (("*",), ("*",))
    chosen = read("--cors-allow-origin http://a --allowed-host b", command="launcher").make_config(Path("/model"))
    assert (chosen.cors.allow_origins, chosen.allowed_hosts) == (("http://a",), ("b",))
    for command, shown in (("serve", "same origin only"), ("launcher", "*")):
        assert f"; repeatable (default: {shown}) [CORS_ALLOW_ORIGIN]" in re.sub(
            r"\s+", " ", build_parser(command).format_help()
        )


def test_help_contains_examples_and_defaults() -> None:
    for command, program in (("serve", "lorax serve"), ("launcher", "lorax-launcher")):
        text = build_parser(command).format_help()
        for title in list(FLAG_GROUPS)[:-1]:
            assert f"\n{title}:\n" in text
        assert all(flag.name in text for flag in FLAGS)
        assert "(default: 1024)" in re.sub(r"\s+", " ", text)
        assert f"{program} --model-id Qwen" in text


def test_help_does_not_import_slow_modules() -> None:
    code = (
        "import sys; from lorax_server.cli import main; main(['serve', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "httpx2", "huggingface_hub", "numpy"} & set(done.stderr.split())


# --- flags, variables and their values


def test_flag_overrides_environment_variable() -> None:
    assert read("--port 1", {"PORT": "2"}).values["port"] == 1
    assert read("", {"PORT": "2"}).values["port"] == 2
    assert read("--no-hub", {"LORAX_HUB": "true"}).values["hub"] is False
    assert read("", {"PORT": "  "}).values.get("port") is None


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "Yes", "on"])
def test_true_values_enable_boolean_flag(text: str) -> None:
    assert read("", {"JSON_OUTPUT": text}).values["json_output"] is True
    assert read(f"--json-output {text}").values["json_output"] is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "off"])
def test_false_values_disable_boolean_flag(text: str) -> None:
    assert read("", {"JSON_OUTPUT": text, "TRUST_REMOTE_CODE": text}).values["json_output"] is False


def test_boolean_flag_without_value_is_true() -> None:
    assert read("--json-output --port 1").values == {"model_id": "owner/model", "json_output": True, "port": 1}


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4k", 4096), ("512M", 2**29), ("4G", 2**32), ("1.5 GiB", 3 * 2**29), ("2TB", 2**41)],
)
def test_size_suffixes_are_parsed(text: str, size: int) -> None:
    assert read("", {"LORAX_CACHE_BYTES": text}).values["cache_bytes"] == size


def test_repeated_flags_form_list() -> None:
    parsed = read("--preloaded-adapter-ids a --preloaded-adapter-ids b", {"CORS_ALLOW_ORIGIN": "http://a, http://b,"})
    assert parsed.values["preloaded_adapter_ids"] == ("a", "b")
    assert parsed.values["cors_allow_origin"] == ("http://a", "http://b")
    assert read("", {"LORAX_API_KEY": "a,b"}).values["api_key"] == ("a,b",), "a key may hold a comma"


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("--port x", {}, "--port: 'x' is not a whole number"),
        ("", {"PORT": "x"}, "the environment variable PORT: 'x' is not a whole number"),
        ("--port 1.5", {}, "not a whole number"),
        (f"--port {'9' * 5000}", {}, "not a whole number"),
        ("--port 70000", {}, "--port = 70000 must be"),
        ("", {"PORT": "70000"}, "the environment variable PORT = 70000 must be"),
        ("", {"DTYPE": "int8"}, "the environment variable DTYPE 'int8' is not supported"),
        ("--max-waiting 0", {}, "--max-waiting = 0 must be at least 1"),
        ("--max-logprobs -1", {}, "--max-logprobs = -1 must not be negative"),
        ("--keep-alive-s 0", {}, "--keep-alive-s = 0.0 must be above 0"),
        ("--drain-s nan", {}, "--drain-s: 'nan' is not a number"),
        ("--cuda-memory-fraction 2", {}, "--cuda-memory-fraction = 2.0 must be at most 1"),
        ("--cache-bytes 4X", {}, "not a size such as 4096, 512M or 4G"),
        ("--cache-bytes -1", {}, "not a size"),
        (f"--cache-bytes {'9' * 400}.5T", {}, "not a size"),
        ("--json-output maybe", {}, "'maybe' is not true or false"),
        ("", {"HF_HUB_OFFLINE": "maybe"}, "HF_HUB_OFFLINE: 'maybe' is not true or false"),
        ("--log-level loud", {}, "'loud' is not one of debug, info"),
        ("--source local", {}, "'local' is not one of hub, s3"),
        ("--adapter-source ftp", {}, "'ftp' is not one of hub, local, s3"),
        ("--adapter-source PBASE", {}, "Predibase's registry is not supported"),
        ("--dtype int8", {}, "--dtype 'int8' is not supported; use one of float32"),
        ("--device tpu", {}, "--device 'tpu' is not supported"),
        ("--quantize marlin", {}, "--quantize 'marlin' is not supported; use one of fp8-kv"),
        ("--trust-remote-code", {}, "--trust-remote-code: checkpoint code is never executed"),
        ("", {"TRUST_REMOTE_CODE": "1"}, "TRUST_REMOTE_CODE: checkpoint code"),
        ("--task translate", {}, "--task: 'translate' is not one of auto, generate, embed"),
        ("--embedding-dim 0", {}, "--embedding-dim = 0 must be at least 1"),
        ("--watermark-gamma 0.25", {}, "--watermark-gamma = 0.25 cannot be changed"),
        ("", {"ROPE_SCALING": "linear"}, "ROPE_SCALING: set rope scaling in the model's config.json"),
        (
            "--max-batch-prefill-tokens 3 --max-num-seqs 4",
            {},
            "--max-batch-prefill-tokens = 3 must be at least --max-num-seqs = 4",
        ),
        ("--max-input-length 8 --max-total-tokens 8", {}, "--max-input-length = 8 must be less than the 8 tokens"),
        ("--cors-allow-credentials", {}, "requires --cors-allow-origin"),
        ("--cors-allow-credentials --cors-allow-origin *", {}, "requires --cors-allow-origin"),
        ("--allowed-host https://api.example.com", {}, "--allowed-host 'https://api.example.com' must be a name"),
        ("--allowed-host api.example.com:80", {}, "--allowed-host 'api.example.com:80' must be a name"),
        ("--max-connections 0", {}, "--max-connections = 0 must be at least 1"),
        ("--adapter-memory-fraction 1.5", {}, "--adapter-memory-fraction = 1.5 must be"),
        ("--adapter-memory-fraction 0.1 --adapter-bytes 1G", {}, "--adapter-memory-fraction = 0.1 cannot both be set"),
        (
            "--cache-bytes 1G",
            {"MAX_BATCH_TOTAL_TOKENS": "5"},
            "and the environment variable MAX_BATCH_TOTAL_TOKENS = 5 cannot",
        ),
        ("--modle-id x", {}, "'--modle-id' is not a known flag; did you mean --model-id?"),
        ("--model x", {}, "'--model' is not a known flag"),
        ("--port", {}, "expected one argument"),
        ("something", {}, "unexpected argument 'something'; use --model-id something"),
    ],
)
def test_invalid_values_are_rejected(line: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        config(line, environ)
    assert "\n" not in str(error.value)


def test_settings_are_checked_before_download() -> None:
    read("--max-batch-total-tokens 100").make_config(None)  # can be checked only with the model folder
    with pytest.raises(ConfigError, match="--port = 70000"):
        read("--port 70000").make_config(None)


def test_secrets_are_not_shown() -> None:
    parsed = read("--api-key secret1 --admin-key secret2", {"HF_TOKEN": "secret3", "LORAX_USE_GLOBAL_HF_TOKEN": "1"})
    assert parsed.adapter_token == "secret3"
    assert "secret" not in repr(parsed) + repr(parsed.make_config(Path("/model")))


def test_ignored_flags_log_a_warning() -> None:
    parsed = read("--compile --eager-prefill false", {"NGROK_AUTHTOKEN": "secret", "REQUEST_LOGGER_URL": "http://x"})
    assert [warning.partition(":")[0] for warning in parsed.warnings] == [
        "--compile has no effect",
        "--eager-prefill has no effect",
        "the environment variable NGROK_AUTHTOKEN has no effect",
        "the environment variable REQUEST_LOGGER_URL has no effect",
    ]
    assert "secret" not in str(parsed.warnings)
    assert not read().warnings


# --- model


def test_serve_and_launcher_have_different_defaults() -> None:
    parsed = parse([], {}, "launcher")
    made = parsed.make_config(Path("/model"))
    assert (parsed.model_id, made.host, made.port) == ("mistralai/Mistral-7B-Instruct-v0.1", "0.0.0.0", 3000)
    assert config().host == "127.0.0.1"


@pytest.fixture
def demo_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that the settings accept as demo model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "DEMO_FOLDER", tmp_path)
    return tmp_path


def test_demo_model_is_the_default(demo_folder: Path) -> None:
    parsed = parse([], {}, "serve")
    made = parsed.make_config(Path("/model"))
    assert made.model_id == "lorax-demo"
    assert made.examples == demo.EXAMPLES_PATH
    assert made.adapters_dir == demo.DEMO_SETTINGS["adapters_dir"]
    assert not made.engine.sources.hub
    assert made.default_source == "local"
    assert made.engine.adapter_bytes == 2**26
    assert made.engine.model.device == "cpu"
    on_gpu = parse(["--device", "auto"], {}, "serve").make_config(Path("/model"), "cuda")
    assert on_gpu.engine.model.device == "cuda"


def test_explicit_settings_override_demo(demo_folder: Path) -> None:
    line = "--adapters-dir /mine --hub true --adapter-bytes 1G --max-batch-total-tokens 4096 -p 8080"
    made = parse(line.split(), {}, "serve").make_config(demo_folder / "model")
    assert made.adapters_dir == Path("/mine")
    assert made.engine.sources.hub
    assert made.engine.adapter_bytes == 2**30
    assert (made.engine.cache_tokens, made.engine.cache_bytes) == (4096, None)


def test_explicit_model_does_not_use_demo_settings(demo_folder: Path) -> None:
    assert parse(["--model-id", "owner/model"], {}, "serve").model_id == "owner/model"
    assert parse([], {"MODEL_ID": "owner/model"}, "serve").model_id == "owner/model"
    assert parse([], {}, "launcher").model_id != demo.DEMO_NAME
    assert config().examples is None


@pytest.mark.parametrize("line", ["--revision main", "--source s3", "--weights-cache-override /somewhere"])
def test_model_flags_require_model_id(demo_folder: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"--model-id is missing.*--model-id Qwen/"):
        parse(line.split(), {}, "serve")


def test_missing_demo_model_is_reported(demo_folder: Path) -> None:
    (demo_folder / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"--model-id is missing.*does not include the demo model"):
        parse([], {}, "serve")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--model-id a/b@v1", ("a/b", "v1")),
        ("--model-id a/b --revision v1", ("a/b", "v1")),
        ("--model-id ./a@b", ("./a@b", None)),
        ("--model-id /a@b --revision v1", ("/a@b", "v1")),
    ],
)
def test_model_revision_is_parsed(line: str, expected: tuple[str, str | None]) -> None:
    parsed = read(line)
    assert (parsed.model_id, parsed.revision) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model-id a/b@v1 --revision v2", "omit --revision"),
        ("--model-id a/b@", "ID@REVISION"),
        ("--model-id @v1", "ID@REVISION"),
    ],
)
def test_invalid_revisions_are_rejected(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(line)


@pytest.mark.parametrize(
    ("line", "environ", "location"),
    [
        ("--model-id team/base", {}, "s3://team/base"),
        ("--model-id base", {"PREDIBASE_MODEL_BUCKET": "bucket"}, "s3://bucket/base"),
        (
            "--model-id base",
            {"PREDIBASE_MODEL_BUCKET": "bucket", "PREDIBASE_MODEL_FOLDER": "a/b/"},
            "s3://bucket/a/b/base",
        ),
        ("--model-id s3://other/base --s3-bucket bucket", {}, "s3://other/base"),
    ],
)
def test_s3_model_location_is_parsed(line: str, environ: dict[str, str], location: str) -> None:
    parsed = read(f"{line} --source s3", environ)
    assert (parsed.model_source, parsed.model_location) == ("s3", location)


@pytest.mark.parametrize(
    ("line", "visible", "ranks"),
    [
        ("", "", 1),
        ("", "0,1,2", 3),
        ("", "GPU-8932f937-d72c,MIG-GPU-1/2/3", 2),
        ("", "all", 1),
        ("", "none", 1),
        ("", "0,-1,1", 1),
        ("--device cpu", "0,1", 1),
        ("--device cuda:1", "0,1", 1),
        ("--sharded true", "0,1", 2),
        ("--sharded true --num-shard 4", "", 4),
        ("--sharded false", "0,1", 1),
        ("--sharded false --num-shard 1", "0,1", 1),
        ("--num-shard 2 --device cpu", "", 2),
        ("--num-shard 2", "0,1,2,3", 2),
    ],
)
def test_num_shard_follows_flags_and_visible_gpus(line: str, visible: str, ranks: int) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        parsed = read(line, {name: visible})
        assert parsed.make_config(Path("/model"), "cuda").engine.tensor_parallel == ranks
        assert not parsed.warnings


def test_invalid_shard_settings_are_rejected() -> None:
    for line, environ in (
        ("--sharded", {}),
        ("--sharded --num-shard 1", {}),
        ("--sharded", {"CUDA_VISIBLE_DEVICES": "all"}),
    ):
        with pytest.raises(ConfigError, match="--sharded requires more than one GPU"):
            read(line, environ)
    with pytest.raises(ConfigError, match="--num-shard = 0 must be at least 1"):
        read("--num-shard 0")
    parsed = read("--sharded false --num-shard 2")
    assert parsed.make_config(Path("/model")).engine.tensor_parallel == 1
    assert parsed.warnings == ("--num-shard has no effect: --sharded is false",)


def test_auto_device_selects_best_device() -> None:
    assert config(device="cuda").engine.model.device == "cuda"
    assert config("--device cpu", device="cuda").engine.model.device == "cpu"
    assert config("--device auto").engine.model.device == "cpu"


# --- memory


def test_cache_size_accepts_tokens_and_fractions() -> None:
    engine = config("--max-batch-total-tokens 100 --adapter-memory-fraction 0.25", device="cuda").engine
    assert (engine.cache_tokens, engine.adapter_memory_fraction) == (100, 0.25)
    with pytest.raises(ConfigError, match="--max-batch-total-tokens = 16 must be at least --max-total-tokens = 20"):
        config("--max-batch-total-tokens 16 --max-total-tokens 20")


# --- adapters and their sources


def test_preload_includes_static_adapter_once() -> None:
    first = "--preloaded-adapter-ids a/x --preloaded-adapter-ids p/y --preloaded-adapter-source s3"
    made = config(f"--adapter-id a/x {first} --s3-bucket b")
    assert made.static_adapter == ("hub", "a/x")
    assert made.engine.preload == (("hub", "a/x"), ("s3", "a/x"), ("s3", "p/y"))
    assert config("--adapter-id a/x --preloaded-adapter-ids a/x").engine.preload == (("hub", "a/x"),)
    assert made.default_source == "hub"


def test_adapter_id_folder_becomes_local_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poet").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("poet", "./poet", str(tmp_path / "poet")):
        made = config(f"--adapter-source local --adapter-id {name}")
        assert made.static_adapter == ("local", str(tmp_path / "poet"))
        assert made.engine.sources.roots == (tmp_path / "poet",), "and nothing beside it"
    made = config("--adapter-source local --adapter-id elsewhere --local-adapters /roots --adapters-dir /others")
    assert made.static_adapter == ("local", "elsewhere")
    assert made.engine.sources.roots == (Path("/others"), Path("/roots")), "what is listed comes first"
    assert made.adapters_dir == Path("/others")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--adapter-source local", "set --local-adapters or --adapters-dir"),
        ("--default-adapter-source s3", "set --s3-bucket"),
        ("--no-hub --adapter-id a/x --local-adapters /x", "--no-hub is set"),
        ("--no-hub --adapter-source hub", "--no-hub is set"),
        ("--preloaded-adapter-ids x --preloaded-adapter-source s3", "set --s3-bucket"),
    ],
)
def test_unavailable_sources_are_rejected(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(line).make_config(None)


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("", "hub"),
        ("--adapter-source s3 --s3-bucket b", "s3"),
        ("--adapter-source hub --default-adapter-source Local --local-adapters /x", "local"),
        ("--no-hub --adapters-dir /x", "local"),
        ("--no-hub --s3-bucket b", "s3"),
        ("--adapters-dir /x", "hub"),
    ],
)
def test_default_adapter_source_follows_flags(line: str, source: str) -> None:
    assert config(line).default_source == source


# --- the environment


@pytest.mark.parametrize("name", ["HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "HF_API_TOKEN"])
def test_hub_token_is_used_for_callers_only_if_enabled(name: str) -> None:
    parsed = read("", {name: " hf_x\n", "HUGGING_FACE_HUB_TOKEN_": "no"})
    assert parsed.token == "hf_x"
    assert parsed.make_config(Path("/model")).engine.sources.hub_token is None, "not for callers"
    shared = read("", {name: "hf_x", "LORAX_USE_GLOBAL_HF_TOKEN": "1"})
    assert shared.make_config(Path("/model")).engine.sources.hub_token == "hf_x"


def test_container_hostname_is_ignored() -> None:
    assert config("", {"HOSTNAME": "lorax-7d9f"}).host == "127.0.0.1"
    assert config("", {"HOSTNAME": "::"}).host == "::"
    assert config("--hostname localhost", {"HOSTNAME": "10.0.0.1"}).host == "localhost"


def test_hub_and_log_variables_are_read(tmp_path: Path) -> None:
    made = config("", {"HF_HUB_OFFLINE": "1", "HUGGINGFACE_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://hub"})
    assert made.engine.sources == SourceConfig(cache=tmp_path, hub=True, hub_offline=True, hub_endpoint="http://hub")
    assert read("", {"HOME": "/home/me"}).cache == Path("/home/me/.cache/lorax")
    assert config("", {"LOG_LEVEL": "WARN"}).log_level == "warning"
    assert read("--no-hub").make_config(Path("/model")).engine.sources.hub is False


@pytest.mark.parametrize(
    ("line", "environ", "endpoint"),
    [
        ("", {"S3_ENDPOINT_URL": "http://s3"}, "http://s3"),
        ("", {"S3_ENDPOINT_URL": "http://s3", "R2_ACCOUNT_ID": "me"}, "https://me.r2.cloudflarestorage.com"),
        ("--s3-endpoint http://mine", {"R2_ACCOUNT_ID": "me"}, "http://mine"),
        ("", {}, None),
    ],
)
def test_s3_endpoint_is_read_from_environment(line: str, environ: dict[str, str], endpoint: str | None) -> None:
    assert config(line, environ).engine.sources.s3_endpoint == endpoint
