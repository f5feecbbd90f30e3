"""`python -m pointsman_lab`."""

import sys

from pointsman_lab.cli.main import main

sys.exit(main())
