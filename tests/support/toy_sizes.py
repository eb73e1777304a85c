"""Arguments that make an example small enough for a test, on one rank and on several."""

LORA = ("--features", "32", "--length", "16", "--steps", "30", "--base-steps", "30")
