"""POST /v1/chat/completions: its tools and messages, and the answer taken apart."""
