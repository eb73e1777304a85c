"""The table of docs/howto/lora.md."""

from __future__ import annotations

from collections.abc import Iterator

from pages import Read, Table, with_spread


def adapters(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """k adapters in one process against k processes."""
    yield (
        "adapters",
        "one step of all: jaxcross, s",
        "k processes, s",
        "times as fast",
        "memory of a host: jaxcross, GB",
        "k processes, GB",
        "jaxcross relative to base and states",
    )
    for row in read("fine_tuning")["rows"]:
        crossover, processes = row["crossover"], row["k processes"]
        yield (
            str(row["adapters"]),
            f"{crossover['s']['median']:.2f}",
            f"{processes['s']['median']:.2f}",
            with_spread(row["times_as_fast"]["raw"]),
            f"{crossover['needed_bytes'] / 1e9:.2f}",
            f"{processes['needed_bytes'] / 1e9:.2f}",
            f"{row['needed_over_base_and_states']:.2f}",
        )


TABLES: dict[str, Table] = {"fine-tuning": adapters}
