"""Turns ImageNet records into batches without TensorFlow, sharded across the world's ranks.

    records.py   opens a TFDS folder or URL as a sequence of records (JPEG bytes and label)
    augment.py   turns a JPEG into a normalised image
    batches.py   turns records into a seeded, resumable iterator of batches
    shared.py    decodes each batch just once for several jobs
    cache/       keeps records of slow storage in memory and on the node's disk;
                 `next_use.py` decides which records to keep
    synth.py     writes a small data set in the real format, for machines without ImageNet

Nothing here communicates: each rank works out its own shard from `rank`, `size` and `seed`.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use
from jaxcross.errors import require_extra

require_extra(
    "data", "`jaxcross.data`", "tensorflow_datasets", "array_record", "grain", "cv2", "fsspec"
)

from jaxcross.data.batches import Batches, eval_batches, train_batches
from jaxcross.data.cache import Cache
from jaxcross.data.records import open_records
from jaxcross.data.shared import SharedDecode
from jaxcross.data.synth import synthesise

if TYPE_CHECKING:  # not public, for jaxcross's other folders
    from jaxcross.data.cache.info import cache_info, is_cache
    from jaxcross.data.records import find_folder
else:
    __getattr__, *_ = on_first_use(__name__)

__all__ = [
    "Batches",
    "Cache",
    "SharedDecode",
    "eval_batches",
    "open_records",
    "synthesise",
    "train_batches",
]


def __dir__() -> list[str]:
    return [*__all__]
