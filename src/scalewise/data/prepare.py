"""Preparation of a run's data, dispatched on the data config."""

from scalewise.data.base import DataConfig, DataSplits
from scalewise.lazy_dispatch import lazy_dispatch, not_registered


@lazy_dispatch
def prepare_splits(config: DataConfig, vocabulary: int, seed: int) -> DataSplits:
    """Prepare the data, such as by tokenizing into a cache, and return the splits.

    Several processes may call it at the same time; a second call only maps the cached files into
    memory.

    Args:
        config: Options of the data.
        vocabulary: Vocabulary size of the model, in tokens.
        seed: Seed of data that are drawn at random.

    Raises:
        DataError: The data are absent, empty or damaged, or have an id of ``vocabulary`` or more.
    """
    raise not_registered(prepare_splits, config)
