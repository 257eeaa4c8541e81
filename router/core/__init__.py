"""The router's state machine: what happens to a request, from submission to last token. Pure."""
