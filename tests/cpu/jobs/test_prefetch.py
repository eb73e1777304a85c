"""What happens to a batch on its way to the device, and to its source."""

import threading
from collections import deque
from queue import SimpleQueue

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcross.jobs import prefetch
from jaxcross.jobs.prefetch import Prefetcher, to_device
from jaxcross.runtime.job_record import JobRecord


def aligned(shape, dtype=np.float32):
    """Returns an array that is aligned so that the CPU backend wouldn't copy it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def lock(array):
    while isinstance(array, np.ndarray):
        array.flags.writeable = False
        array = array.base


@pytest.mark.mostly_integration("shape0", "shape1", "shape3")
@pytest.mark.parametrize("shape", [(), (3,), (1000, 7), (1 << 20,)])
def test_a_buffer_can_be_filled_again(shape):
    buffer = aligned(shape)
    buffer[...] = 1
    batch = to_device({"x": buffer, "even": buffer[..., :1] if shape else buffer})
    buffer[...] = 2
    assert (batch["x"] == 1).all()
    assert (batch["even"] == 1).all()
    assert batch["x"].shape == shape


def test_read_only_arrays_are_not_copied():
    buffer = aligned((1024,))
    lock(buffer)
    assert to_device(buffer).unsafe_buffer_pointer() == buffer.ctypes.data


def test_a_read_only_view_of_a_buffer_is_copied():
    buffer = aligned((1024,))
    view = buffer[:512]
    view.flags.writeable = False
    batch = to_device(view)
    buffer[...] = 2
    assert (batch == 0).all()


def test_every_kind_of_leaf():
    column = np.arange(6.0, dtype=np.float32).reshape(2, 3).T
    device = jnp.ones(2)
    kinds = {
        "column": column,
        "half": np.ones(3, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 2)),
        "scalar": np.int32(4),
    }
    batch = to_device({**kinds, "text": "label", "device": device})
    for name, array in kinds.items():
        assert np.array_equal(batch[name], array)
    assert batch["half"].dtype == jnp.bfloat16
    assert batch["text"] == "label"
    assert batch["device"] is device
    with pytest.raises(TypeError, match="(?i)^dtype object is not a valid JAX array type"):
        to_device(np.array([None]))


class Driver:
    """Accepts every call of a prefetcher."""

    def __getattr__(self, name):
        return lambda *args: None


def test_a_loop_that_is_collected_while_it_is_closed_ends(monkeypatch):
    """Python may collect an abandoned loop at any allocation, closing its generator again."""
    record = JobRecord(0, "a", threading.Thread, SimpleQueue())
    loop = Prefetcher(driver=Driver(), job=record, stream=0, data=[1, 2, 3])

    class Collecting(deque):
        def __init__(self):
            super().__init__()
            monkeypatch.setattr(prefetch, "deque", deque)
            loop.close()

    monkeypatch.setattr(prefetch, "deque", Collecting)
    closer = threading.Thread(target=loop.close, daemon=True)
    closer.start()
    closer.join(60)
    loop._thread.join(60)
    assert loop.closed and not closer.is_alive() and not loop._thread.is_alive()
