"""Request and response bodies of LoRAX, OpenAI and the Responses API."""
