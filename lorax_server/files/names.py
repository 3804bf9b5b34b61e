"""File names in model and adapter folders."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DRAFT_HEADS_FILE = "medusa_lm_head.safetensors"
MODEL_CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
VOCABULARY_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
GGUF_FILE_LIST = "gguf.json"  # list of the GGUF files with the weights, in a model folder made from GGUF files
