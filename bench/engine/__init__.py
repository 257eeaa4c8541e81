"""The engine alone: tokens per second, exactness, what a step costs."""
