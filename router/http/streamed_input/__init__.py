"""POST /v1/completions/stream: a prompt that arrives in parts."""
