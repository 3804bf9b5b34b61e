"""Request and response bodies of the LoRAX, OpenAI and adapter routes."""
