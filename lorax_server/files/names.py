"""Names of files in the folders of models and adapters."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
VOCABULARY_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
