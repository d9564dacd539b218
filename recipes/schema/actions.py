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
class PlanConfig:
    """Whose habits of memory a plan assumes: this engine's, or those of the FSDP paper's engine and loops
    (docs/paper_figures.md). A run is always compared with, and refused by, a plan of this engine."""

    gradients: str = described(
        "as_they_come",
        "into the unit's source as_they_come, or concatenated at the end of the unit's backward, before its weights go",
        choices=("as_they_come", "concatenated"),
    )
    frees_gradients: bool = described(False, "reduced gradients are given back after each step, not kept for the next")
    keeps_output: bool = described(False, "what the model returned is kept until the next forward has returned")
    packs_state: bool = described(
        False,
        "what stays from step to step lies in allocator segments of its own; false: where the first step put it",
    )


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
