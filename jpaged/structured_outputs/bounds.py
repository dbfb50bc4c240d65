"""What the form of an answer may ask: every bound, in one table (docs/structured_output.md)."""

from typing import NamedTuple

from jpaged.errors import ErrorKind, RequestError


class Bound(NamedTuple):
    """At most so many of something.

    Attributes:
        most: How many.
        what: Of what.
        remedy: What to do about more.
    """

    most: int
    what: str
    remedy: str

    def check(self, path: str, number: int) -> None:
        """Raise ValueError, naming `path`, if there are more."""
        if number > self.most:
            raise RequestError(
                path,
                f"has {number} {self.what}",
                remedy=f"at most {self.most} are allowed; {self.remedy}",
                kind=ErrorKind.TOO_LARGE,
            )


SOURCE = Bound(64 * 1024, "characters", "shorten it")
"""Of a schema's JSON, a regular expression, a grammar, or all choices together."""

CHOICES = Bound(1024, "choices", "leave some out")

DEPTH = Bound(32, "schemas around it", "use $defs")
"""Of schemas within schemas; references are counted by `SCHEMAS`."""

SCHEMAS = Bound(2048, "schemas", "split it, or ask for less in one answer")
"""A chain of references is no longer than this. llguidance goes down it by recursion, with some
3.5 KiB of stack a schema, and threads that compile have `STACK`."""

MERGED = Bound(16, "schemas that hold for one value", "write allOf, $ref and anyOf out")
"""By `allOf`, by `$ref`, and by the one of `anyOf` or `oneOf` that has most."""

PATTERNS = Bound(4, "patterns and formats for one value", "make them one pattern")
"""Their product is one automaton."""

MULTIPLES = Bound(1, "multipleOf for one value", "give their least common multiple")

MULTIPLE = 10_000
"""The largest `multipleOf`: an automaton has a state for each remainder."""

PATTERN_NAMES = Bound(32, "names", "make them one pattern")
"""Of `patternProperties`: every two are compared."""

OPTIONAL = Bound(128, "properties that may be left out", "make some required, or leave them out")
"""Of one object: after each, all later ones may follow."""

PROPERTY_SETS = Bound(
    128,
    "combinations of optional properties",
    "make some properties required, or drop the keyword",
)
"""Combinations that `minProperties` and `maxProperties` allow: each is a case of the grammar."""

OPTIONS = Bound(256, "cases", "leave some out")
"""Of `anyOf`, `oneOf`, `allOf`; every two of `oneOf` are compared."""

VALUES = Bound(2048, "values", "leave some out")
"""In an `enum` or a `const`, those within values too."""

NUMBER = 2**53
"""The largest magnitude of a number in a schema: beyond it llguidance rounds."""

RULES = Bound(4096, "rules", "leave some out")
"""Of a grammar. llguidance goes down a chain of rules by recursion, with some 3 KiB of stack."""

QUANTIFIERS = Bound(500, "repetitions", "write fewer of ?, *, + and {}")
"""Written in one regular expression."""

GROUPS = Bound(100, "groups around a group", "nest fewer")
"""In a regular expression, or in a grammar's rule."""

REPEATED = Bound(10_000, "repetitions within repetitions", "lower the numbers in {}")
"""The largest product of nested counts in a regular expression, or in a grammar."""

STACK = 64 * 2**20
"""Bytes of stack of the threads that compile."""

TRIAL_STACK = STACK // 2
"""Of the threads that try a form for a server: what passes there passes in the engine."""

TRIAL_SECONDS = 3.0
"""Of a processor's time, to try a form for a server."""

TRIAL_MEMORY = 256 * 2**20
"""Bytes, to try a form for a server."""

TRIAL_TOKENS = 24
"""Tokens of a random answer with which a form is tried for a server."""

LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,  # some 4 ms
    "step_max_items": 5_000,  # less than 1 ms
    "max_items_in_row": 600,  # an ambiguous grammar's time a token is quadratic in it: some 6 ms
    "max_lexer_states": 32_768,  # of some 560 bytes; `grammar.Matcher` replaces a full lexer
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's own, for compiling and for each token."""

LEXERS = 64
"""Of one grammar, each compiled anew: more answers at a time share them."""

ALL_LEXERS = 512
"""Of all grammars, of 0.1 to 0.3 MiB for usual schemas: of more, spare ones are dropped."""

LEXER_MEMORY = 512 * 2**20
"""Bytes of all lexers. Beyond them spare lexers are dropped, new answers share lexers, and running
answers replace theirs by smaller ones."""

IDLE_SECONDS = 30.0
"""Seconds without an answer after which all lexers are released."""

LEXER_SECONDS = 0.02
"""Of a processor's time, to compile a grammar: one that takes longer has a single lexer."""

SHARED_TOKENS = 32_768
"""Tokens of finished answers after which a grammar's only lexer is replaced for new answers."""

MASK_SECONDS = 0.02
"""CPU time that each mask of an answer may take, on average."""

MASK_DEBT = 0.1
"""CPU time by which an answer's masks may together exceed that average before the answer fails."""
