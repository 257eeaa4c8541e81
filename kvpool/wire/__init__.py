"""Messages about KV to protobuf and back."""
