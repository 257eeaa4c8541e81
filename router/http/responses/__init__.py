"""POST /v1/responses: OpenAI's Responses API over the internal form of a chat."""
