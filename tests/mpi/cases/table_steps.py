"""Steps of every collective and element type, repeated in random order.

    table_steps.py STEPS X64 SEED JOBS

Each row is a step under `crossover`. Compiled steps are repeated and new ones are compiled in
between, so exchanges, agreements and compilation follow each other in every order. All ranks draw
the same order from the seed. Each step must give the same bits as its row's first run. If JOBS is
0, the script itself makes the steps one after the other. Otherwise that many jobs make them
concurrently, with random delays in their threads.
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

os.environ["XLA_FLAGS"] = (
    wire_table.FLAGS
)  # as before the import above, because a rank has a single device here
NEW = 0.2  # share of steps that are made and compiled as new


def make_steps(table, inputs, steps, seed):
    """Makes `steps` steps. Returns the rows, how many were new, and the rows whose bits changed."""
    draw = random.Random(seed)
    known, first, wrong, made = {}, {}, [], 0
    for _ in range(steps):
        name = draw.choice(list(table))
        dtype, function = table[name]
        if draw.random() < NEW or name not in known:
            known[name] = jaxcross.crossover(function, axes="a")
            made += 1
        got = np.asarray(known[name](inputs[dtype]))
        if got.tobytes() != first.setdefault(name, got).tobytes():
            wrong.append(name)
        if draw.random() < 0.02:
            known.pop(draw.choice(list(known)))  # so its executables may be freed
    return set(first), made, wrong


def main() -> None:
    steps, x64, seed, jobs = map(int, sys.argv[1:])
    jax.config.update("jax_enable_x64", bool(x64))
    world = jaxcross.initialize(stall_timeout_s=120)
    warnings.simplefilter("ignore")  # `index` exchanges nothing
    types = (*wire_table.FLOATS, *wire_table.INTEGERS, "bool", "complex64")
    if not x64:
        types = tuple(t for t in types if not t.endswith("64") or t == "complex64")
    inputs = wire_table.make(types, world.size, world.rank)
    table = {name: (dtype, f) for name, dtype, f in wire_table.rows(world.size, "a", types)}
    results = []
    if jobs == 0:
        results.append(make_steps(table, inputs, steps, seed))
    else:
        os.environ["JAXCROSS_CHAOS"] = str(seed)
        with jaxcross.Runner(world) as runner:
            for number in range(jobs):

                def train(job, number=number):
                    results.append(make_steps(table, inputs, steps // jobs, f"{seed} {number}"))

                runner.add(f"job{number}", train)
            runner.run()
    rows, made, wrong = zip(*results, strict=True)
    texts = world.control.allgather_text(json.dumps(wrong))
    everywhere = [name for text in texts for names in json.loads(text) for name in names]
    if world.rank == 0:
        print(
            json.dumps(
                {
                    "steps": steps,
                    "made": sum(made),
                    "rows": len(set().union(*rows)),
                    "wrong": everywhere,
                }
            )
        )


main()
