"""Runs the named rows of the zoo and of the table of loops in the same processes."""

import loops_table  # noqa: F401
import zoo_table  # noqa: F401
