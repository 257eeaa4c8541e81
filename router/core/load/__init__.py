"""What the router expects of its workers: queues, step times, output lengths. Pure."""
