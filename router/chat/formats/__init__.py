"""How families of models write tool calls and reasoning: one module for each format. Pure."""
