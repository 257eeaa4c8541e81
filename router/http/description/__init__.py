"""The OpenAPI description of the public HTTP API, from the models that parse its requests."""
