"""The OpenAI route `/v1/responses`. It is stateless: no response is stored."""
