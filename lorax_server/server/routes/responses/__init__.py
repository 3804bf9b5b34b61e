"""OpenAI's `/v1/responses`, without state: from items to messages, and from an answer to items."""
