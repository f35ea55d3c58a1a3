"""What text has to be before it can go anywhere."""

from __future__ import annotations

from pdserve.errors import InvalidArgument


def check_unicode(field: str, text: str, part: str = "") -> None:
    """Half of a surrogate pair is no character: nothing can send or tokenise it. JSON's escapes can spell one, and a
    command's arguments that are not UTF-8 become some. `part` says where in the field. Raises InvalidArgument."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"{part} is" if part else "is"
        problem = f"{where} not valid Unicode: a lone surrogate at character {error.start}"
        raise InvalidArgument(field, problem) from None
