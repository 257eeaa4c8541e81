"""What decides about KV blocks: pure, without a clock, a socket or a device."""
