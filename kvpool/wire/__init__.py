"""Messages about KV to bytes and back."""
