"""Anything that a client may send: nothing crashes the router, and every refusal is one."""
