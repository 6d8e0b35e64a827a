"""HTML by construction: every text is escaped unless it says that it is markup already."""

import json
from html import escape
from typing import Any

from gpattention.runs.tables import visible


class Safe(str):
    """Markup.  Formatting or joining it makes plain text again, which is then escaped."""

    __slots__ = ()


def tag(name: str, *children: "str | None", **attributes: "str | int | bool | None") -> Safe:
    """An element; `class_` is class, `aria_label` aria-label, True a bare attribute, None is left out."""
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in ("meta", "br", "img"):
        return Safe(f"<{head}>")
    return Safe(f"<{head}>{join(*children)}</{name}>")


def join(*parts: "str | None") -> Safe:
    """Markup as it is, text escaped, None left out."""
    texts = (part if isinstance(part, Safe) else _escaped(part) for part in parts if part is not None)
    return Safe("".join(texts))


def json_script(name: str, content: Any) -> Safe:
    """Data for programs that read the page; nothing in it can end the element or begin another."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Safe(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def _attribute(key: str, value: "str | int | bool | None") -> str:
    key = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {key}" if value is True else f' {key}="{_escaped(str(value))}"'


def _escaped(text: str) -> str:
    return escape(visible(text, keep="\n\t"))
