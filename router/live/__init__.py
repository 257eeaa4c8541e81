"""The running router around its core: connections, metrics, status, records."""
