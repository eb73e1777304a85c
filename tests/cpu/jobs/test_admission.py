"""The words in which a job is refused for lack of memory; `tests/mpi/cases/memory_table.py` has the rest."""

from jaxcross.jobs.admission import MemoryAdmission
from jaxcross.plan.memory import JobMemory


def test_need_of_a_job_alone_is_stated_once() -> None:
    text = MemoryAdmission(100)._refusal("a", JobMemory(peak_bytes=300), 0, "make the batch smaller, or ")
    assert text == (
        "it does not fit into the memory of rank 0: 200 B are missing. It needs 300 B, and the limit is 100 B. To make"
        " it fit, make the batch smaller, or give `Runner(memory=...)` if a rank may use more."
    )
