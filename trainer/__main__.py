"""Entry point of `python -m trainer`, which is the same as the command `wmse`."""

import sys

from trainer.cli import main

sys.exit(main())
