"""What the router knows: workers, requests, who holds which block. Pure."""
