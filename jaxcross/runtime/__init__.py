"""Runs the segments of several jobs on one device: policy, interleaver (pure), driver (threads), vote, jobs."""
