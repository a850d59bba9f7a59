"""Search the elements next to midpoints that stablenorm.testing keeps, and write them anew."""

import json

from stablenorm.testing import midpoints

if __name__ == "__main__":
    midpoints.FILE.write_text(json.dumps(list(midpoints.make())) + "\n", "utf-8")
