"""The bundled library of devices and models, as YAML."""
