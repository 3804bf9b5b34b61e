"""LoRAX's own names of flags and environment variables, and those that have no effect here."""

# Flags of LoRAX by the field that they set. Their environment variables have no prefix.
FLAG_NAMES = {
    "model_revision": "--revision",
    "tokenizer_config_path": "--tokenizer-config-path",
    "dtype": "--dtype",
    "quantize": "--quantize",
    "tensor_parallel": "--num-shard",
    "static_adapter": "--adapter-id",
    "default_source": "--default-adapter-source",
    "preload": "--preloaded-adapter-ids",
    "cache": "--huggingface-hub-cache",
    "host": "--hostname",
    "port": "--port",
    "allow_origins": "--cors-allow-origin",
    "allow_headers": "--cors-allow-header",
    "expose_headers": "--cors-expose-header",
    "allow_methods": "--cors-allow-method",
    "allow_credentials": "--cors-allow-credentials",
    "max_concurrent_requests": "--max-concurrent-requests",
    "max_best_of": "--max-best-of",
    "max_stop_sequences": "--max-stop-sequences",
    "max_input_length": "--max-input-length",
    "max_length": "--max-total-tokens",
    "max_step_tokens": "--max-batch-prefill-tokens",
    "cache_tokens": "--max-batch-total-tokens",
    "adapter_memory_fraction": "--adapter-memory-fraction",
    "gpu_memory_fraction": "--cuda-memory-fraction",
    "json_logs": "--json-output",
    "otlp_endpoint": "--otlp-endpoint",
}
# Further variables by the field that they set. The flag's own variable wins.
VARIABLES = {
    "hub_endpoint": "HF_ENDPOINT",
    "hub_offline": "HF_HUB_OFFLINE",
    "s3_bucket": "PREDIBASE_MODEL_BUCKET",
    "s3_prefix": "PREDIBASE_MODEL_FOLDER",
    "log_level": "LOG_LEVEL",
}
TOKENS = ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "HF_API_TOKEN")

PREDIBASE = "Predibase's registry is not supported; use the sources hub, s3 or local"
WATERMARK = "watermarks have gamma 0.5 and delta 2.0"

# Flags without effect, by the reason. They are accepted, and the log gives the reason.
UNUSED_FLAGS = {
    "the engine decides by itself what to compile": (
        "--compile", "--eager", "--compile-max-batch-size", "--compile-max-rank", "--compile-batch-size",
    ),
    "there is no speculation yet; answers are the same without": (
        "--speculative-tokens", "--speculation-max-batch-size",
    ),
    "requests are checked in the server's own threads": ("--validation-workers",),
    "requests join a batch between any two steps": (
        "--waiting-served-ratio", "--max-waiting-tokens", "--eager-prefill",
    ),
    "prompts are always computed in pieces that fit": ("--chunked-prefill",),
    "prompts that begin alike always share their cache": ("--prefix-caching",),
    "the adapter is applied as it is, which gives the same numbers": ("--merge-adapter-weights",),
    "memory is the only limit; see --adapter-bytes": ("--max-active-adapters",),
    "adapters come and go as requests need them": ("--adapter-cycle-time-s",),
    "the engine chooses its kernels by itself": ("--backend", "--disable-sgmv", "--disable-custom-kernels"),
    "use --cuda-memory-fraction or --cache-bytes": ("--memory-wiggle-room",),
    "ranks find each other by themselves, on one machine": ("--shard-uds-path", "--master-addr", "--master-port"),
    "there is no tunnel in the server; run ngrok beside it": ("--ngrok", "--ngrok-authtoken", "--ngrok-edge"),
    PREDIBASE: ("--predibase-api-token",),
}  # fmt: skip
# Variables of LoRAX without a flag.
UNUSED_VARIABLES = {
    "REQUEST_LOGGER_URL": "requests are not sent to anybody; see --log-prompts and --otlp-endpoint",
    "PREDIBASE_GATEWAY_ENDPOINT": PREDIBASE,
}
REFUSED_VARIABLES = dict.fromkeys(
    ("ROPE_SCALING", "ROPE_FACTOR"), "rope scaling is what the model's config.json says; change it there"
)
