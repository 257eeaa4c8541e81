"""The blocks of one device: who holds which, which are cached, which one is evicted next."""
