"""Samples made of token blocks: next-token prediction, and T5's span corruption.

Shapes: B samples, S input tokens, T target tokens, R raw tokens of one span-corruption sample, N spans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.packing import TokenBlocks
from recipes.data.randomness import key_of, random_table
from recipes.data.records import Batch, Dataset
from recipes.data.tokenizer import Ids, Vocabulary
from recipes.data.vocab import SpanLengths


class CausalSamples(Dataset):
    """Each block of S + 1 ids gives S inputs and, one place on, their S labels."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        ids = torch.from_numpy(self._blocks.blocks(indices))  # [B, S + 1]
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class SpanCorruptedSamples(Dataset):
    """Each block of R ids gives an input whose masked spans are sentinels, and a target that spells them out.

    Input (S ids):  kept_0 <s0> kept_1 <s1> ... kept_N-1 <sN-1> </s>
    Target (T ids): <s0> masked_0 <s1> masked_1 ... <sN-1> masked_N-1 </s>
    Where the spans lie follows from (seed, epoch, index): another epoch masks other tokens of the same text.
    """

    def __init__(self, blocks: TokenBlocks, lengths: SpanLengths, vocabulary: Vocabulary, seed: int) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._sentinels = np.array(vocabulary.sentinel_ids[: lengths.num_spans], dtype=np.int64)
        self._eos_id = vocabulary.eos_id
        self._seed = seed

    def __len__(self) -> int:
        return len(self._blocks)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        ids = self._blocks.blocks(indices)  # [B, R]
        is_masked = noise_masks(self._lengths, key_of("spans", self._seed, epoch), indices)
        return {
            "input_ids": torch.from_numpy(self._with_sentinels(ids, is_masked)),
            "labels": torch.from_numpy(self._with_sentinels(ids, ~is_masked)),
        }

    def _with_sentinels(self, ids: Ids, is_replaced: NDArray[np.bool_]) -> Ids:
        """[B, R] ids -> each replaced span as its sentinel, then the end id. All rows come out equally long.

        Replacing the kept spans of a row gives its target, because a row begins with a kept span: kept span k lies
        right before masked span k and becomes sentinel k.
        """
        is_first = is_replaced.copy()
        is_first[:, 1:] &= ~is_replaced[:, :-1]
        span_number = is_first.cumsum(axis=1) - 1
        replaced = np.where(is_first, self._sentinels[span_number], ids)
        stays = is_first | ~is_replaced
        rows = replaced[stays].reshape(len(ids), -1)
        return np.concatenate([rows, np.full((len(ids), 1), self._eos_id)], axis=1)


def noise_masks(lengths: SpanLengths, key: int, samples: Sequence[int]) -> NDArray[np.bool_]:
    """[B, R]: which tokens are masked, drawn for each sample from ``key`` and its number alone.

    Kept and masked spans alternate, beginning with a kept one and ending with a masked one; their lengths are a
    uniformly drawn division of the two token counts into N parts each (as in T5).
    """
    rows = np.asarray(samples, dtype=np.uint64)
    kept = _random_parts(lengths.raw_len - lengths.num_noise_tokens, lengths.num_spans, key_of("kept", key), rows)
    masked = _random_parts(lengths.num_noise_tokens, lengths.num_spans, key_of("masked", key), rows)
    spans = np.stack([kept, masked], axis=2).reshape(len(rows), -1)  # [B, 2 N] lengths, in order
    starts = spans.cumsum(axis=1)[:, :-1]  # of all but the first span
    turns = np.zeros((len(rows), lengths.raw_len), dtype=np.int64)
    np.put_along_axis(turns, starts, 1, axis=1)
    return turns.cumsum(axis=1) % 2 == 1


def _random_parts(total: int, num_parts: int, key: int, rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """[B, num_parts] positive lengths that sum to ``total``, every division equally likely."""
    edges = np.full((len(rows), num_parts + 1), total, dtype=np.int64)
    edges[:, 0] = 0
    if num_parts > 1:
        bits = random_table(key, rows, total - 1)  # one for each place between two tokens; the least win
        cuts = np.argpartition(bits, num_parts - 2, axis=1)[:, : num_parts - 1]
        edges[:, 1:-1] = np.sort(cuts, axis=1) + 1
    return np.diff(edges, axis=1)
