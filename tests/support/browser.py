"""A page as a headless Chromium shows it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 120  # reached only by a hang


@dataclass(frozen=True)
class Seen:
    """text: the document's after loading. picture: of the window, [height, width, RGB(A)] in 0 to 1."""

    text: str
    picture: np.ndarray

    @property
    def num_colours(self) -> int:
        return len(np.unique(self.picture[..., :3].reshape(-1, 3), axis=0))


def rendered(page: Path, scratch: Path) -> Seen:
    """scratch: a folder for the picture and the browser's profile. Skips where there is no browser."""
    program = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    picture = scratch / "seen.png"
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={scratch / 'browser'}",
    ]
    shot = [*quiet, f"--screenshot={picture}", "--window-size=1200,1000", page.absolute().as_uri()]
    subprocess.run([program, *shot], check=True, capture_output=True, timeout=LIMIT_S)
    dom = [program, *quiet, "--dump-dom", page.absolute().as_uri()]
    text = subprocess.run(dom, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    return Seen(text, matplotlib.image.imread(picture))
