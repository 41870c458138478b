"""What a run writes down: no secrets, known by their names and by what the environment gives such names; for nobody else to change."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_NO_SECRET_TOKENS = "".join(f"(?<!{name}_)" for name in ("pad", "eos", "bos", "cls", "sep", "unk", "mask", "start", "end"))
SECRET = re.compile(rf"api_?key|access_?key|private_?key|secret|passw(or)?d|credential|(^|_){_NO_SECRET_TOKENS}token$", re.IGNORECASE)
"""Found in the name of a key, an argument or an environment variable, its value is a secret. A vocabulary's tokens are none."""
REDACTED = "<redacted>"
SHORTEST = 6
"""Characters of a value that is looked for wherever it stands; a shorter one would be found in ordinary words."""
_PAIR = re.compile(r"""(?P<name>[\w.-]+)(?P<between>["']?[ \t]*[:=][ \t]*)(?P<value>"[^"\n]+"|'[^'\n]+'|[^\s"',}\]]+)""")
_NOTHING = {"null", "None", "~", "true", "false"}


def redacted(text: str, code: bool = False) -> str:
    """`text` (YAML, JSON, overrides) without secrets. In source `code` only quoted values count: there a name is often a variable's."""

    def hide(pair: re.Match[str]) -> str:
        value = pair["value"]
        is_secret = SECRET.search(pair["name"].rpartition(".")[2]) and value not in _NOTHING
        if not is_secret or (code and value[0] not in "\"'"):
            return pair[0]
        quote = value[0] if value[0] in "\"'" else ""
        return f"{pair['name']}{pair['between']}{quote}{REDACTED}{quote}"

    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, REDACTED)
    return _PAIR.sub(hide, text)


@contextlib.contextmanager
def not_for_all_to_write() -> Iterator[None]:
    """Files and folders made inside are as the umask says, but never writable for everybody."""
    umask = os.umask(0o022)
    os.umask(umask | 0o002)
    try:
        yield
    finally:
        os.umask(umask)
