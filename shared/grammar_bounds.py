"""Pure: how large and how deep a grammar from outside may be, before it is given to llguidance.

llguidance 1.9.1 follows references between rules by recursion in native code: a chain of some 1,200 `$ref` in a JSON Schema
or 2,500 rules in a Lark grammar overflows an 8 MB stack and kills the process, and 12,000 terminals in a chain take
minutes. So what a caller sends is bounded here, in the gateway and again where it is compiled.
"""

from __future__ import annotations

from typing import Final

from proto.chat import Grammar

GRAMMAR_BYTES_MAX: Final = 64 * 1024
# Each link of a chain needs a reference (JSON Schema), or a rule and so a colon (Lark, whose `%json` may hold references).
REFERENCES_COUNT_MAX: Final = 400
COLONS_COUNT_MAX: Final = 1_000


def excess_of(grammar: Grammar) -> str | None:
    """Why the grammar is refused, None if it may be compiled. A schema's text must be JSON made by json.dumps."""
    size_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size_bytes > GRAMMAR_BYTES_MAX:
        return f"a grammar has at most {GRAMMAR_BYTES_MAX} bytes, not {size_bytes}"
    if grammar.kind == "json_schema":
        references = grammar.text.count('"$ref"') + grammar.text.count('"$dynamicRef"')
        if references > REFERENCES_COUNT_MAX:
            return f"a schema has at most {REFERENCES_COUNT_MAX} references, not {references}"
    if grammar.kind == "lark" and grammar.text.count(":") > COLONS_COUNT_MAX:
        return f"a Lark grammar has at most {COLONS_COUNT_MAX} colons, not {grammar.text.count(':')}"
    return None
