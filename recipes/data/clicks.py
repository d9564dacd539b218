"""What click sources share: rows of dense and categorical features with a 0/1 label, and hashing of categories."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.errors import DataError
from recipes.data.records import Batch, Dataset, PrepareRequest

MISSING_ROW = 0  # of a hashed table: no value


class ClickRows(Dataset):
    """Chosen rows of three arrays (in memory, or files mapped into it), N rows in all.

    dense [N, D] float, sparse [N, tables] integer, labels [N] 0 or 1; ``rows``: which of them, in order.
    """

    def __init__(
        self, dense: NDArray[Any], sparse: NDArray[Any], labels: NDArray[Any], rows: NDArray[np.int64]
    ) -> None:
        self._dense, self._sparse, self._labels, self._rows = dense, sparse, labels, rows

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        rows = self._rows[np.asarray(indices, dtype=np.int64)]
        return {
            "dense": torch.from_numpy(self._dense[rows].astype(np.float32)),
            "sparse": torch.from_numpy(self._sparse[rows].astype(np.int64)),
            "labels": torch.from_numpy(self._labels[rows].astype(np.float32)),
        }


def require_clicks(kind: str, request: PrepareRequest) -> None:
    """Raises DataError if the model does not train on clicks."""
    if request.task != "clicks":
        raise DataError(
            f"data.kind={kind} gives clicks, but the model's task is {request.task}; choose a click model "
            "(model=dhen_tiny) or other data (data=stdlib_text for text, data=synthetic_images for images)"
        )


class CategoryHash:
    """Values of one categorical feature to rows [1, num_rows) of its table; row 0 is for missing values.

    The same value always gets the same row, in every run and on every machine; two values may share one.
    """

    def __init__(self, feature: str, num_rows: int) -> None:
        self._salt = feature.encode()
        self._num_rows = num_rows
        self._known: dict[str, int] = {}

    def rows(self, values: Sequence[str | None]) -> NDArray[np.int32]:
        """The row of each value; an empty value counts as missing."""
        return np.fromiter((self._row(value) for value in values), dtype=np.int32, count=len(values))

    def _row(self, value: str | None) -> int:
        if not value:
            return MISSING_ROW
        if value not in self._known:
            digest = hashlib.blake2b(value.encode(), digest_size=8, key=self._salt).digest()
            self._known[value] = 1 + int.from_bytes(digest, "little") % (self._num_rows - 1)
        return self._known[value]
