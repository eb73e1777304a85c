"""A train step as data: trace -> cut -> segments (the IR) -> compile. Knows neither MPI nor who runs it."""
