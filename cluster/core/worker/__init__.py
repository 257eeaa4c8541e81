"""What one worker decides: its schedulers, its blocks, and what routers hear. Pure."""
