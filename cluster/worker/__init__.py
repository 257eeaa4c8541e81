"""One worker process: its loop, its engine, and what it says to routers and peers."""
