"""What no message for users may contain."""

import re

PYDANTICS_WORDS = re.compile(
    r"input should|instance of|after validation|value error|type=\w+"
    r"|valid (string|list|integer|dictionary|boolean|tuple|number)|NoneType",
    re.IGNORECASE,
)
"""How pydantic would put it: names of Python's types, of its classes, of its phases."""
