"""`python -m gpattention` is `gpattention`."""

import sys

from gpattention.cli import main

sys.exit(main())
