"""Steps of every collective and element type, again and again in random order: `table_steps.py STEPS X64 SEED`.

Each row is a step under `crossover`. Compiled steps come again and new ones are made in between, so that exchanges,
agreements and compilation follow one another in every way. All ranks draw the same order from the seed. Each step must
give the bits of its row's first run.
"""

import json
import os
import random
import sys
import warnings

import jax
import numpy as np
import wire_table

import jaxcross

os.environ.pop("XLA_FLAGS")  # of the module above: here a rank has one device
NEW = 0.2  # of all steps are made anew


def main() -> None:
    steps, x64, seed = map(int, sys.argv[1:])
    world = jaxcross.initialize(watchdog_s=120)
    warnings.simplefilter("ignore")  # `index` exchanges nothing
    types = (*wire_table.FLOATS, *wire_table.INTEGERS, "bool", "complex64")
    if not x64:
        types = tuple(t for t in types if not t.endswith("64") or t == "complex64")
    draw = random.Random(seed)
    with jax.enable_x64(bool(x64)):
        inputs = wire_table.make(types, world.size, world.rank)
        table = {name: (dtype, f) for name, dtype, f in wire_table.rows(world.size, "a", types)}
        known: dict = {}
        first: dict = {}
        wrong, made = [], 0
        for number in range(steps):
            if world.rank == 0 and number % 1000 == 0:
                print(f"{number} steps", flush=True)
            name = draw.choice(list(table))
            dtype, function = table[name]
            if draw.random() < NEW or name not in known:
                known[name] = jaxcross.crossover(function, axes="a")
                made += 1
            got = np.asarray(known[name](inputs[dtype]))
            if got.tobytes() != first.setdefault(name, got).tobytes():
                wrong.append(name)
            if draw.random() < 0.02:
                known.pop(draw.choice(list(known)))  # its executables may go
    everywhere = [name for text in world.control.allgather_text(json.dumps(wrong)) for name in json.loads(text)]
    if world.rank == 0:
        print(json.dumps({"steps": steps, "made": made, "rows": len(first), "wrong": everywhere}))


main()
