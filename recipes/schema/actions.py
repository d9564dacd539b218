"""What actions beside training are told."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import described


@dataclass
class ExportConfig:
    """``action=export``: a checkpoint as a Hugging Face folder."""

    dir: str | None = described(None, "folder to write; new or empty")
    dtype: str = described(
        "as_saved",
        "of the floating-point tensors; as_saved: the checkpoint's",
        choices=("as_saved", "float32", "bfloat16", "float16"),
    )
    max_file_bytes: int = described(5_000_000_000, "largest safetensors file; more files follow", at_least=1)


@dataclass
class CalibrateConfig:
    """``action=calibrate``: this machine as a hardware profile."""

    name: str = described("measured", "name of the profile, as hardware=NAME takes it")
    dir: str | None = described(
        None, "folder of presets (--config-dir) that gets hardware/NAME.yaml; null: configs/ in the run folder"
    )
    seconds: float = described(20.0, "what measuring may take, about", above=0, at_most=3600)


@dataclass
class GenerateConfig:
    """``action=generate``: text from a checkpoint."""

    prompt: str = described("", "text to go on from; for T5 the encoder's input, <extra_id_0> where a span is missing")
    max_new_tokens: int = described(200, "tokens to write, fewer where the model ends the text", at_least=1)
    temperature: float = described(0.8, "divides the logits before drawing; 0: always the likeliest token", at_least=0)
    top_k: int | None = described(None, "draw among this many likeliest tokens; null: all", at_least=1)
    seed: int = described(0, "of the drawing; the same seed gives the same text", at_least=0, below=2**63)
