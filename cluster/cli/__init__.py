"""The commands of `kvrelay`."""
