"""Tables and pages of what is measured need no torch: `pointsman report` starts in a fraction of a second."""

import subprocess
import sys


def test_reports_are_read_without_torch() -> None:
    code = "import sys, pointsman_lab.report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
