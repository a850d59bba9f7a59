"""``python -m stablenorm`` is the command ``stablenorm``."""

import sys

from stablenorm.cli import main

sys.exit(main())
