"""What image sources share: checks of the task and of the size."""

from __future__ import annotations

from recipes.data.errors import DataError
from recipes.data.records import PrepareRequest


def resolved_image_size(kind: str, data_image_size: int | None, request: PrepareRequest) -> int:
    """Pixels on a side: the data's, or the model's. Raises DataError if they differ, or the model wants no images."""
    if request.task != "images":
        raise DataError(
            f"data.kind={kind} gives images, but the model's task is {request.task}; choose an image model "
            "(model=regnet_tiny or model=deepvit_tiny) or other data (data=stdlib_text for text, data=flights for "
            "clicks)"
        )
    if data_image_size is None and request.image_size is None:
        raise DataError("neither the model nor the data says how large images are; set data.image_size")
    if data_image_size is not None and request.image_size not in (None, data_image_size):
        raise DataError(
            f"data.image_size={data_image_size} differs from model.image_size={request.image_size}; "
            "leave data.image_size=null to take the model's"
        )
    return data_image_size or request.image_size or 0
