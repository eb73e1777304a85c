"""How many examples a Hypothesis test tries: 10 in the quick tier, all of them with
`--hypothesis-profile full`.
"""

from hypothesis import settings


def scaled(many: int) -> int:
    return many if settings.get_current_profile_name() == "full" else min(10, many)
