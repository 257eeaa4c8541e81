"""POST /v1/messages: Anthropic's API over the internal form of a chat."""
