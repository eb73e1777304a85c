"""Scales down the number of examples that a Hypothesis test tries.

The quick tier tries at most 10; `--hypothesis-profile full` tries all of them.
"""

from hypothesis import settings


def scaled(many: int) -> int:
    return many if settings.get_current_profile_name() == "full" else min(10, many)
