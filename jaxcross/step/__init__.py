"""A train step, wrapped: its variants by argument types, agreed between ranks, tuned, and run."""
