"""The router's core and its shell: decisions, metrics, wire."""
