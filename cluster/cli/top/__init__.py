"""`kvrelay top`: what routers report, live in the terminal."""
