"""`python -m train_doctor FILE.py` is the command `train-doctor`, where that is not on the PATH."""

import sys

from train_doctor.script import command

sys.exit(command())
