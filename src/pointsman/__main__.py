"""`python -m pointsman`."""

import sys

from pointsman.cli.main import main

sys.exit(main())
