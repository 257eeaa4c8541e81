"""What was measured on live processes, and their arrivals served by the simulator with it."""
