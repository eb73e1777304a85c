"""Is every rank alive, and what to do if one is not: watchdog, heartbeat, flight recorder, abort."""
