"""``python -m ascend_emulator``: the command, where its script is not on the path."""

import sys

from ascend_emulator.run import main

sys.exit(main())
