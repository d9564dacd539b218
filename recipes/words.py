"""``Words``: text to ids and back, with the sentinels of span corruption spelled ``<extra_id_0>``, ``<extra_id_1>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.data.errors import DataError
from recipes.data.records import DataInfo
from recipes.data.tokenizer import TextTokenizer

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class Words:
    """sentinel_ids: of sentinel 0, 1, ...; empty for causal models, which read ``<extra_id_0>`` as plain text."""

    tokenizer: TextTokenizer
    sentinel_ids: tuple[int, ...]
    eos_id: int
    pad_id: int

    @classmethod
    def of(cls, info: DataInfo) -> Words:
        tokenizer, sentinels = info.extras.get("tokenizer"), info.extras.get("sentinel_ids", ())
        if not isinstance(tokenizer, TextTokenizer) or not isinstance(sentinels, tuple):
            raise DataError("the data source has no tokenizer, so there is no text to write; expected a text source")
        eos_id = tokenizer.eos_id if info.eos_id is None else info.eos_id
        return cls(tokenizer, sentinels, eos_id, 0 if info.pad_id is None else info.pad_id)

    def ids(self, text: str) -> list[int]:
        """Without an end token.

        Raises:
            DataError: the text names a sentinel that the model does not have.
        """
        found: list[int] = []
        for number, part in enumerate(_SENTINEL.split(text) if self.sentinel_ids else [text]):
            if number % 2 == 0:
                found += self.tokenizer.encode([part.encode()])[0].tolist()
            elif int(part) < len(self.sentinel_ids):
                found.append(self.sentinel_ids[int(part)])
            else:
                raise DataError(
                    f"generate.prompt names <extra_id_{part}>; the model has the sentinels <extra_id_0> to "
                    f"<extra_id_{len(self.sentinel_ids) - 1}>"
                )
        return found

    def text(self, ids: Sequence[int]) -> str:
        """Sentinels spelled out; ids that stand for no text left out."""
        numbers = {token: number for number, token in enumerate(self.sentinel_ids)}
        parts: list[str] = []
        between: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in numbers:
                between.append(token)
                continue
            parts.append(self.tokenizer.decode(np.array(between, dtype=np.int64)))
            between = []
            if token is not None:
                parts.append(f"<extra_id_{numbers[token]}>")
        return "".join(parts)
