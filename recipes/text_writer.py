"""Token after token from a language model. B = 1 throughout; S tokens read, V vocabulary."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.data.errors import DataError
from recipes.ranks import Ranks
from recipes.schema.model import ModelConfig
from recipes.tasks.base import logits_of
from recipes.words import Words


@dataclass(frozen=True)
class Draw:
    """How a token is chosen. temperature: 0 takes the likeliest, without drawing. top_k: null draws among all."""

    temperature: float
    top_k: int | None
    generator: torch.Generator

    def token(self, logits: Tensor) -> int:
        """Of logits [V], on any device: drawn on the CPU, so that a seed gives the same text everywhere."""
        scores = logits.float().cpu()
        if self.temperature == 0:
            return int(scores.argmax())
        if self.top_k is not None and self.top_k < scores.numel():
            least = scores.topk(self.top_k).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        chances = ((scores - scores.max()) / self.temperature).softmax(dim=0)
        return int(torch.multinomial(chances, 1, generator=self.generator))


class Writer(abc.ABC):
    """A model and what it has been given to go on from."""

    @abc.abstractmethod
    def logits(self, written: list[int]) -> Tensor:
        """[V]: of the token that follows ``written``. Every rank calls."""

    @abc.abstractmethod
    def shown(self, prompt: str, text: str) -> str:
        """Both for people."""


class CausalWriter(Writer):
    """The prompt goes on; without one a document begins (behind the end of another). Beyond the model's positions it
    reads the newest tokens only."""

    def __init__(self, model: nn.Module, words: Words, prompt: str, longest: int | None, device: torch.device) -> None:
        self._model, self._device, self._longest = model, device, longest
        self._prompt = words.ids(prompt) or [words.eos_id]

    def logits(self, written: list[int]) -> Tensor:
        tokens = [*self._prompt, *written][-self._longest if self._longest else 0 :]
        output: Tensor = logits_of(self._model(torch.tensor([tokens], device=self._device)))
        return output[0, -1]

    def shown(self, prompt: str, text: str) -> str:
        return prompt + text


class Seq2SeqWriter(Writer):
    """The encoder reads the prompt once; what is written is the decoder's."""

    def __init__(self, model: nn.Module, words: Words, prompt: str, device: torch.device) -> None:
        self._model, self._device, self._start = model, device, words.pad_id
        self._source = torch.tensor([[*words.ids(prompt), words.eos_id]], device=device)
        self._encoded: Tensor | None = None

    def logits(self, written: list[int]) -> Tensor:
        target = torch.tensor([[self._start, *written]], device=self._device)
        if self._encoded is None:
            output = self._model(input_ids=self._source, decoder_input_ids=target)
            self._encoded = output.encoder_last_hidden_state
        else:
            output = self._model(encoder_outputs=(self._encoded,), decoder_input_ids=target)
        found: Tensor = logits_of(output)
        return found[0, -1]

    def shown(self, prompt: str, text: str) -> str:
        return f"{prompt}\n-> {text}"


def writer_for(
    task: str, model: nn.Module, words: Words, prompt: str, config: ModelConfig, device: torch.device
) -> Writer:
    """Raises DataError for a model that writes no text."""
    model.eval()
    if task == "causal_lm":
        return CausalWriter(model, words, prompt, getattr(config, "max_seq_len", None), device)
    if task == "seq2seq_lm":
        return Seq2SeqWriter(model, words, prompt, device)
    raise DataError(f"the model '{config.kind}' writes no text (its task is {task}); expected a language model")


def write_tokens(writer: Writer, draw: Draw, max_new_tokens: int, eos_id: int, ranks: Ranks) -> list[int]:
    """At least one token, the end token included where the model wrote it. Rank 0 chooses: rounding may differ from
    device to device, and every rank must go on from the same tokens."""
    written: list[int] = []
    while len(written) < max_new_tokens:
        logits = writer.logits(written)
        token = draw.token(logits) if ranks.is_main else 0
        written.append(int(ranks.sum(torch.tensor(token, device=ranks.device))))
        if written[-1] == eos_id:
            break
    return written
