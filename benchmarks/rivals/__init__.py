"""The programs that `race.py` starts on the hosts, one rival a file, and what they share."""
