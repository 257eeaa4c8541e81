"""What the readers and grammars of formats are made of: markers, JSON, Lark. Pure."""
