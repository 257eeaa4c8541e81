"""Files of the disk tier."""
