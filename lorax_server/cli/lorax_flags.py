"""The names of LoRAX flags and environment variables, and the reasons why some of them are ignored."""

# LoRAX flags by settings field. Their environment variables have no LORAX_ prefix.
FLAG_NAMES = {
    "model_revision": "--revision",
    "tokenizer_config_path": "--tokenizer-config-path",
    "dtype": "--dtype",
    "quantize": "--quantize",
    "embedding_dim": "--embedding-dim",
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
    "speculative_tokens": "--speculative-tokens",
    "speculation_max_batch_size": "--speculation-max-batch-size",
    "json_logs": "--json-output",
    "otlp_endpoint": "--otlp-endpoint",
}
# Additional environment variables by settings field. The variable named after the flag takes precedence.
VARIABLE_BY_SETTING = {
    "hub_endpoint": "HF_ENDPOINT",
    "hub_offline": "HF_HUB_OFFLINE",
    "s3_bucket": "PREDIBASE_MODEL_BUCKET",
    "s3_prefix": "PREDIBASE_MODEL_FOLDER",
    "log_level": "LOG_LEVEL",
}
TOKEN_VARIABLES = ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "HF_API_TOKEN")

PREDIBASE_REASON = "Predibase's registry is not supported; use the sources hub, s3 or local"
WATERMARK_REASON = "watermarks have gamma 0.5 and delta 2.0"

# Ignored flags by reason. They are accepted, and the reason is logged.
IGNORED_FLAGS = {
    "compilation is not configurable": (
        "--compile", "--eager", "--compile-max-batch-size", "--compile-max-rank", "--compile-batch-size",
    ),
    "requests are validated in the API process": ("--validation-workers",),
    "requests can join the batch at every step": (
        "--waiting-served-ratio", "--max-waiting-tokens", "--eager-prefill",
    ),
    "prefill is always chunked": ("--chunked-prefill",),
    "prefix caching is always on": ("--prefix-caching",),
    "adapters are never merged into the base model; completions are the same": ("--merge-adapter-weights",),
    "memory is the only limit; see --adapter-bytes": ("--max-active-adapters",),
    "adapters are loaded and evicted on demand": ("--adapter-cycle-time-s",),
    "kernels are selected automatically": ("--backend", "--disable-sgmv", "--disable-custom-kernels"),
    "use --cuda-memory-fraction or --cache-bytes": ("--memory-wiggle-room",),
    "ranks run on one machine and connect automatically": ("--shard-uds-path", "--master-addr", "--master-port"),
    "ngrok is not built in; run it as a separate process": ("--ngrok", "--ngrok-authtoken", "--ngrok-edge"),
    PREDIBASE_REASON: ("--predibase-api-token",),
}  # fmt: skip
# LoRAX environment variables without a flag.
IGNORED_VARIABLES = {
    "REQUEST_LOGGER_URL": "requests are not sent to a logging service; see --log-prompts and --otlp-endpoint",
    "PREDIBASE_GATEWAY_ENDPOINT": PREDIBASE_REASON,
}
REJECTED_VARIABLES = dict.fromkeys(
    ("ROPE_SCALING", "ROPE_FACTOR"), "set rope scaling in the model's config.json instead"
)
