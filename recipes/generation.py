"""``run``: one rank of ``action=generate``: text from a trained language model.

All ranks run the same forwards on the same tokens, each gathering the units in turn as in training: a model that fits
no single device writes, too. Nothing is cached between tokens but the encoder's output: this is for looking at what
a run has learned, not for serving.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from recipes.context import RankContext
from recipes.prepare import data_info
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.report import Report
from recipes.schema import RecipeConfig
from recipes.seeds import choose_kernels
from recipes.text_writer import Draw, write_tokens, writer_for
from recipes.trained_model import trained_model
from recipes.words import Words

FILE = "generation.json"


@dataclass(frozen=True)
class Generated:
    """text: what was written, without the prompt. is_ended: the model ended the text itself."""

    weights: str
    step: int | None
    prompt: str
    text: str
    num_tokens: int
    is_ended: bool
    temperature: float
    top_k: int | None
    seed: int


def run(config: RecipeConfig, context: RankContext) -> Generated:
    """Prints the text and leaves ``generation.json`` in the run folder (rank 0). Called by every rank.

    Raises:
        DataError: the tokenizer cannot be had. Others: as ``trained_model``.
    """
    ranks, report, wanted = Ranks.of(context), Report.of(context), config.generate
    choose_kernels(config.run)
    info = data_info(config, ranks, report)
    sharded, step = trained_model(config, context, ranks, info, report)
    words = Words.of(info)
    writer = writer_for(MODELS[config.model.kind].task, sharded.model, words, wanted.prompt, config.model, ranks.device)
    draw = Draw(wanted.temperature, wanted.top_k, torch.Generator().manual_seed(wanted.seed))
    with torch.no_grad():
        tokens = write_tokens(writer, draw, wanted.max_new_tokens, words.eos_id, ranks)
    is_ended = tokens[-1] == words.eos_id
    result = Generated(
        weights=config.model.init_from or config.checkpoint.resume,
        step=step,
        prompt=wanted.prompt,
        text=words.text(tokens[:-1] if is_ended else tokens),
        num_tokens=len(tokens),
        is_ended=is_ended,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        seed=wanted.seed,
    )
    if context.is_main:
        file = Path(context.run_dir) / FILE
        file.write_text(json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    report.line("")
    report.line(writer.shown(wanted.prompt, result.text))
    report.close()
    return result
