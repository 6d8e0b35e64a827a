"""Strings that would do something if they were not text."""

from hypothesis import strategies as st

NASTY = (
    "\x1b[2J\x1b[31mred", "\x9b31m", "two\nlines", "a\r\nb", "\ttab", "bell\x07", "nul\x00",
    "back\x08\x08\x08",
    "\u202egnp.exe", "\u2066isolate", "line\u2028break", "\ufeffbom", "lone \udcff", "\x85next",
    "=HYPERLINK(\"http://x\",\"y\")", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "＝1",  # noqa: RUF001
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- ", "]]>", "&lt;b&gt;",
    '"><b>',
    "a | b", "a \\| b", "`code`", "``` fence", "**bold**", "_em_", "__init__", "~~gone~~", "[a](http://x)",
    "![a](x)", "<http://x>", "# heading", "> quote", "- item", "1. item", "1) item", "---", "===", "    code",
    "back\\", "\\", "|", "$x$", "\\input{/etc/passwd}", "\\\\", "%comment", "{", "}", "a_b^c", "#1", "--", "",
    " ", "None", "nan", "-inf", "dropout_draws", "0.5 ± 0.1",
)  # fmt: skip
texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(), max_size=6),
    st.text("=+-@\t\r\n|`*_~<>&[]()!#$%^{}\\\"' \x1b\u202e\udcffab1.", max_size=12),
    st.lists(st.sampled_from(NASTY), max_size=3).map("".join),
)
