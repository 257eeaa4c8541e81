"""Which transports exist, which of them two processes use, and what a link is worth."""
