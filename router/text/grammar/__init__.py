"""What an answer must match: schemas, patterns, choices and Lark, all in one form."""
