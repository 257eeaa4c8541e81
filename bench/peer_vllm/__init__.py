"""vLLM's CPU build, beside kvrelay: its engine alone, and its own prefill/decode split."""
