"""Your loop: runners, jobs, their threads, their data and what they log."""
