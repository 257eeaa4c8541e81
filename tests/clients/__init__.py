"""Other people's clients, unmodified, in environments of their own: `make test-clients`."""
