"""Signed values that clients carry from one router to another. Pure."""
