"""Every flag of `lorax serve` and `lorax-launcher`, once. `flags` reads them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A setting, given as `--name value` or by an environment variable."""

    name: str
    help: str
    kind: str = "text"
    """text, integer, number, size, switch or path; `flags` knows what each is made of."""
    to: str = ""
    """The field of the settings it becomes, such as `engine.max_rows`; none: `flags` has code for it."""
    short: str = ""
    repeats: bool = False
    choices: tuple[str, ...] = ()
    is_secret: bool = False
    is_ours: bool = False
    """LoRAX does not have it. Its variable then begins with LORAX_, since plain names may mean something to others."""
    also_from: tuple[str, ...] = ()
    """Further environment variables."""
    instead: str = ""
    """Why it does nothing here. It is accepted, and this is said."""
    refusal: str = ""
    """Why it cannot be honoured, though it would change answers."""

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables it is read from, the first one that is set."""
        if self.name == "--env":  # prints and changes nothing; ENV often means something else
            return ()
        return ("LORAX_" * self.is_ours + self.key.upper(), *self.also_from)


def _own(name: str, help: str, kind: str = "text", to: str = "", **more: object) -> Flag:
    return Flag(name, help, kind, to, is_ours=True, **more)  # type: ignore[arg-type]


def _unused(name: str, instead: str, kind: str = "text") -> Flag:
    return Flag(name, "", kind, instead=instead)


GRAPHS = "the engine decides by itself what to compile"
MANY_GPUS = "ranks find each other by themselves, on one machine"
TUNNEL = "there is no tunnel in the server; run ngrok beside it"
BATCHING = "requests join a batch between any two steps"
WATERMARK = "watermarks have gamma 0.5 and delta 2.0"

TABLE: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("--model-id", "base model: a hub id, id@revision, or a folder; s3://bucket/path with --source s3"),
        Flag("--revision", "branch, tag or commit of the model on the hub"),
        Flag("--source", "where the model comes from (default: hub)", choices=("hub", "s3")),
        Flag("--weights-cache-override", "use the model in this folder instead of fetching it", "path"),
        Flag(
            "--tokenizer-config-path",
            "another tokenizer_config.json, for its chat template",
            "path",
            "server.tokenizer_config_path",
        ),
        Flag(
            "--dtype",
            "float32, float16 or bfloat16 (default: float32 on a CPU, the checkpoint's on a GPU)",
            to="model.dtype",
        ),
        Flag("--quantize", "fp8-kv: keys and values as float8", to="model.quantize"),
        Flag("--sharded", "divide the model over several GPUs, or do not", "switch"),
        Flag("--num-shard", "over how many (default: those that CUDA_VISIBLE_DEVICES lists)", "integer"),
        _own("--device", "cpu, cuda, cuda:<index> or auto, which is a GPU where there is one (default: auto)"),
        _own(
            "--served-model-name",
            "another name for the model, the first one is shown; repeatable",
            to="server.served_names",
            repeats=True,
        ),
        Flag(
            "--trust-remote-code",
            "not supported: code of a checkpoint is never run",
            "switch",
            refusal="code that comes with a checkpoint is never run; leave it out if the architecture is supported",
        ),
        Flag("--embedding-dim", "not supported", "integer", refusal="embeddings are not supported yet"),
    ),
    "adapters": (
        Flag("--adapter-id", "adapter for requests that name none"),
        Flag("--adapter-source", "where it comes from: hub, local or s3 (default: hub)"),
        Flag("--default-adapter-source", "where adapters of requests come from (default: --adapter-source)"),
        Flag(
            "--preloaded-adapter-ids",
            "adapter that is loaded before the first request and stays; repeatable",
            repeats=True,
        ),
        Flag("--preloaded-adapter-source", "where those come from (default: --adapter-source)"),
        _own("--local-adapters", "folder below which the source local may read; repeatable", "path", repeats=True),
        _own(
            "--adapters-dir",
            "folder each of whose subfolders is an adapter, also those that come later",
            "path",
            "server.adapters_dir",
        ),
        _own("--hub", "adapters may come from a hub; --no-hub: they may not (default: they may)", "switch"),
        _own("--hub-endpoint", "address of the hub", to="sources.hub_endpoint", also_from=("HF_ENDPOINT",)),
        _own(
            "--s3-bucket",
            "bucket that the source s3 reads",
            to="sources.s3_bucket",
            also_from=("PREDIBASE_MODEL_BUCKET",),
        ),
        _own(
            "--s3-prefix",
            "what the keys of all its adapters begin with",
            to="sources.s3_prefix",
            also_from=("PREDIBASE_MODEL_FOLDER",),
        ),
        _own("--s3-endpoint", "address of the S3 service, if it is not Amazon's", to="sources.s3_endpoint"),
        _own("--adapter-timeout-s", "how long a request waits for its adapter", "number", "engine.adapter_timeout_s"),
        _own(
            "--adapter-disk-bytes",
            "disk space for fetched adapters (default: half of what is free without them)",
            "size",
            "sources.disk_bytes",
        ),
        Flag("--huggingface-hub-cache", "where models and adapters are kept (default: ~/.cache/lorax)", "path"),
    ),
    "network and access": (
        Flag("--hostname", "address to listen on"),
        Flag("--port", "port to listen on; 0 takes a free one", "integer", "server.port", short="-p"),
        _own(
            "--api-key",
            "key that callers need, better given as LORAX_API_KEY; repeatable",
            to="server.api_keys",
            repeats=True,
            is_secret=True,
        ),
        _own("--keys-file", "keys with names, adapters and limits", "path", "server.keys_file"),
        _own(
            "--admin-key",
            "key for loading and unloading adapters, better given as LORAX_ADMIN_KEY",
            to="server.admin_key",
            is_secret=True,
        ),
        Flag("--cors-allow-origin", "origin whose pages may ask; repeatable", to="cors.allow_origins", repeats=True),
        Flag("--cors-allow-header", "header they may send; repeatable", to="cors.allow_headers", repeats=True),
        Flag("--cors-expose-header", "header they may read; repeatable", to="cors.expose_headers", repeats=True),
        Flag("--cors-allow-method", "method they may use; repeatable", to="cors.allow_methods", repeats=True),
        Flag("--cors-allow-credentials", "whether they may send credentials", "switch", "cors.allow_credentials"),
        _own(
            "--allowed-host",
            "name by which requests may call this server, besides localhost and the address it listens on; * is any; "
            "repeatable (default: none where only this machine can connect, else any)",
            to="server.allowed_hosts",
            repeats=True,
        ),
    ),
    "limits": (
        Flag(
            "--max-concurrent-requests",
            "answers under way; more are refused",
            "integer",
            "server.max_concurrent_requests",
        ),
        Flag("--max-best-of", "samples to choose the best of", "integer", "server.max_best_of"),
        Flag("--max-stop-sequences", "stop sequences of a request", "integer", "server.max_stop_sequences"),
        Flag(
            "--max-input-length",
            "tokens of a prompt (default: one less than in all)",
            "integer",
            "server.max_input_length",
        ),
        Flag(
            "--max-total-tokens",
            "tokens of prompt and answer (default: what the model was made for)",
            "integer",
            "engine.max_length",
        ),
        _own("--max-connections", "open connections; idle ones give way", "integer", "server.max_connections"),
        _own(
            "--max-connections-per-address",
            "those of one client's address; 0 is no limit, for servers behind a proxy",
            "integer",
            "server.max_connections_per_address",
        ),
        _own(
            "--new-adapters-per-minute",
            "adapters that a key may name and that are new here (default: 60; without keys: no limit)",
            "integer",
            "server.new_adapters_per_minute",
        ),
        _own("--max-body-bytes", "size of a request", "size", "server.max_body_bytes"),
        _own(
            "--request-timeout-s",
            "seconds until a request is given up (default: never)",
            "number",
            "server.request_timeout_s",
        ),
        _own(
            "--drain-s",
            "seconds that requests have to end when the server is asked to stop",
            "number",
            "server.drain_s",
        ),
    ),
    "memory and speed": (
        _own("--max-rows", "sequences that run at once", "integer", "engine.max_rows"),
        Flag(
            "--max-batch-prefill-tokens",
            "tokens that are computed in a step (default: 512 on a CPU, 2048 on a GPU)",
            "integer",
            "engine.max_step_tokens",
        ),
        Flag("--max-batch-total-tokens", "tokens that the cache holds (default: what fits)", "integer"),
        _own("--cache-bytes", "the same as a size, on every GPU, such as 512M or 4G", "size", "engine.cache_bytes"),
        Flag("--cuda-memory-fraction", "share of a GPU's memory that is used", "number", "engine.gpu_memory_fraction"),
        Flag("--adapter-memory-fraction", "share of a GPU's memory for adapters (default: 0.1)", "number"),
        _own("--adapter-bytes", "the same as a size (default on a CPU: 1G)", "size", "engine.adapter_bytes"),
        _own(
            "--adapter-host-bytes",
            "for adapters that wait in host memory (default: an eighth of it)",
            "size",
            "engine.adapter_host_bytes",
        ),
    ),
    "logs, and what else": (
        _own(
            "--log-level",
            "debug, info, warning or error",
            to="server.log_level",
            also_from=("LOG_LEVEL",),
            choices=("debug", "info", "warning", "error"),
        ),
        _own("--log-prompts", "write prompts and answers to the log", "switch", "server.log_prompts"),
        Flag("--json-output", "write the log as JSON", "switch", "server.json_logs"),
        Flag("--otlp-endpoint", "where traces are sent to", to="server.otlp_endpoint"),
        Flag("--env", "print what this machine and installation are, then go on", "switch", short="-e"),
        Flag("--download-only", "fetch the model, then stop", "switch"),
    ),
    "from LoRAX": (
        _unused("--compile", GRAPHS, "switch"),
        _unused("--eager", GRAPHS, "switch"),
        _unused("--compile-max-batch-size", GRAPHS),
        _unused("--compile-max-rank", GRAPHS),
        _unused("--compile-batch-size", GRAPHS),
        _unused("--speculative-tokens", "there is no speculation yet; answers are the same without"),
        _unused("--speculation-max-batch-size", "there is no speculation yet; answers are the same without"),
        _unused("--validation-workers", "requests are checked in the server's own threads"),
        _unused("--waiting-served-ratio", BATCHING),
        _unused("--max-waiting-tokens", BATCHING),
        _unused("--eager-prefill", BATCHING, "switch"),
        _unused("--chunked-prefill", "prompts are always computed in pieces that fit", "switch"),
        _unused("--prefix-caching", "prompts that begin alike always share their cache", "switch"),
        _unused("--merge-adapter-weights", "the adapter is applied as it is, which gives the same numbers", "switch"),
        _unused("--max-active-adapters", "memory is the only limit; see --adapter-bytes"),
        _unused("--adapter-cycle-time-s", "adapters come and go as requests need them"),
        _unused("--backend", "the engine chooses its kernels by itself"),
        _unused("--disable-sgmv", "the engine chooses its kernels by itself", "switch"),
        _unused("--disable-custom-kernels", "the engine chooses its kernels by itself", "switch"),
        _unused("--memory-wiggle-room", "use --cuda-memory-fraction or --cache-bytes"),
        _unused("--shard-uds-path", MANY_GPUS),
        _unused("--master-addr", MANY_GPUS),
        _unused("--master-port", MANY_GPUS),
        _unused("--ngrok", TUNNEL, "switch"),
        Flag("--ngrok-authtoken", "", instead=TUNNEL, is_secret=True),
        _unused("--ngrok-edge", TUNNEL),
        Flag(
            "--predibase-api-token",
            "",
            is_secret=True,
            instead="Predibase's registry is not supported; use the sources hub, s3 or local",
        ),
        Flag("--watermark-gamma", f"fixed: {WATERMARK}", "number"),
        Flag("--watermark-delta", f"fixed: {WATERMARK}", "number"),
    ),
}
FLAGS = tuple(flag for group in TABLE.values() for flag in group)

# Variables of LoRAX that no flag stands for, and that would change answers, or that somebody may count on.
REFUSED_VARIABLES = dict.fromkeys(
    ("ROPE_SCALING", "ROPE_FACTOR"), "rope scaling is what the model's config.json says; change it there"
)
UNUSED_VARIABLES = {
    "REQUEST_LOGGER_URL": "requests are not sent to anybody; see --log-prompts and --otlp-endpoint",
    "PREDIBASE_GATEWAY_ENDPOINT": "Predibase's registry is not supported; use the sources hub, s3 or local",
}
