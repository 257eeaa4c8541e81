"""The clients for programs: with threads, and with an event loop."""
