"""Trace rows as padded batches, split by trajectory."""

from collections.abc import Sequence
from typing import NamedTuple

import lightning as L
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trace_gen.store import TraceStore

SPLIT_SHARES = (0.8, 0.1, 0.1)


class RowBatch(NamedTuple):
    """Rows of a trace table.

    `scalars`: name -> (B,) tensor; `lists`: name -> (B, K) tensor, zero-padded; `valid_BK` bool.
    """

    scalars: dict[str, Tensor]
    lists: dict[str, Tensor]
    valid_BK: Tensor


def pad_table(table: pa.Table) -> RowBatch:
    """A batch from an arrow table whose list columns have equal lengths within a row."""
    scalars, lists, valid = {}, {}, None
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        if not pa.types.is_list(column.type):
            scalars[name] = torch.from_numpy(np.array(column))
            continue
        counts = np.array(column.value_lengths())
        values = np.array(column.flatten())
        if valid is None:
            valid = np.arange(counts.max())[None, :] < counts[:, None]
        padded = np.zeros(valid.shape, dtype=values.dtype)
        padded[valid] = values
        lists[name] = torch.from_numpy(padded)
    return RowBatch(scalars, lists, torch.from_numpy(valid))


class Rows(torch.utils.data.Dataset):
    """Chosen rows of a memory-mapped trace table; a batch is fetched as one arrow table."""

    def __init__(self, table: Dataset, indices: np.ndarray):
        self.table, self.indices = table.with_format("arrow"), indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> pa.Table:
        return self.table[[int(self.indices[index])]]

    def __getitems__(self, indices: Sequence[int]) -> pa.Table:
        return self.table[self.indices[list(indices)].tolist()]


class EpochShuffle(Sampler[int]):
    """A permutation that is a function of the seed and the epoch alone, so that a resumed run sees the same batches."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(np.random.default_rng((self.seed, self.epoch)).permutation(self.count).tolist())


def split_trajectories(trajectories: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trajectory numbers of the training, validation and test part, 80/10/10, disjoint; each at least one."""
    unique = np.unique(trajectories)
    if len(unique) < 3:
        raise ValueError(f"trace.limit: {len(unique)} trajectories cannot be split three ways; make at least 3")
    order = np.random.default_rng(seed).permutation(unique)
    held = [max(1, round(len(unique) * share)) for share in SPLIT_SHARES[1:]]
    return order[sum(held) :], order[: held[0]], order[held[0] : sum(held)]


class TraceData(L.LightningDataModule):
    """Loaders over the columns of a store's rows. The split is by trajectory: no trajectory is in two parts."""

    def __init__(self, store: TraceStore, columns: Sequence[str], *, batch_size: int, limit: int, seed: int):
        super().__init__()
        self.store, self.columns = store, ["trajectory", *columns]
        self.batch_size, self.limit, self.seed = batch_size, limit, seed

    def setup(self, stage: str | None = None) -> None:
        table = self.store.rows().select_columns(self.columns)
        numbers = table.with_format("numpy")["trajectory"][:]
        numbers = np.asarray(numbers)
        wanted = np.unique(numbers[numbers < self.limit])
        parts = split_trajectories(wanted, self.seed)
        self.parts = [Rows(table, np.flatnonzero(np.isin(numbers, part))) for part in parts]

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.parts[0], EpochShuffle(len(self.parts[0]), self.seed))

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.parts[1])

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.parts[2])

    def _loader(self, rows: Rows, sampler: Sampler | None = None) -> DataLoader:
        return DataLoader(rows, batch_size=self.batch_size, sampler=sampler, collate_fn=pad_table)
