"""What is said in a chat: what clients ask, and what an assistant answers. Pure."""
