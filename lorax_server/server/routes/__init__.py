"""HTTP routes: LoRAX, OpenAI, adapters, server info and the playground."""
