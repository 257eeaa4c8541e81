"""The transports, the choice between them for two processes, and the speed of a link."""
