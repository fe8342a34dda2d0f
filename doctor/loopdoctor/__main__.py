"""`python -m loopdoctor FILE.py` is the command `loopdoctor`, where that is not on the PATH."""

import sys

from loopdoctor.script import command

sys.exit(command())
