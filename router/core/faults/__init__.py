"""What a router concludes from faults: silent workers, and requests that kill workers. Pure."""
