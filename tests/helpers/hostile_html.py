"""Texts that would break out of an HTML page that does not escape them."""

HOSTILE = [
    "<script>alert(1)</script>",
    "</code></td></table><b>out</b>",
    '"><img src=x onerror="alert(1)">',
    "&lt;b&gt; &amp; & &#60;",
    "<!-- ",
    "]]> <![CDATA[",
    "--><script>alert(1)</script>",
    "{title} %s $x^{$",
]
