"""``python -m launcher`` is ``fsdp-launch``; so is ``torchrun ... -m launcher``."""

import sys

from launcher.entry import main

if __name__ == "__main__":
    sys.exit(main())
