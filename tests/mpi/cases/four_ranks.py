"""The rows of the zoo and of the table of loops that are named, by the same processes."""

import loops_table  # noqa: F401
import zoo_table  # noqa: F401
