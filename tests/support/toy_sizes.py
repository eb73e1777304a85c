"""Command-line arguments that make an example small enough for tests."""

LORA = ("--features", "32", "--length", "16", "--steps", "30", "--base-steps", "30")
