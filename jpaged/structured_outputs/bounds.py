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

    limit: int
    noun: str
    remedy: str

    def check(self, path: str, number: int) -> None:
        """Raise ValueError, naming `path`, if there are more."""
        if number > self.limit:
            raise RequestError(
                path,
                f"has {number} {self.noun}",
                remedy=f"at most {self.limit} are allowed; {self.remedy}",
                kind=ErrorKind.TOO_LARGE,
            )


SOURCE_LENGTH = Bound(64 * 1024, "characters", "shorten it")
"""Of a schema's JSON, a regular expression, a grammar, or all choices together."""

CHOICES = Bound(1024, "choices", "leave some out")

SCHEMA_DEPTH = Bound(32, "schemas around it", "use $defs")
"""Of schemas within schemas; references are counted by `SCHEMAS`."""

SCHEMAS = Bound(2048, "schemas", "split it, or ask for less in one answer")
"""A chain of references is no longer than this. llguidance goes down it by recursion, with some
3.5 KiB of stack a schema, and threads that compile have `STACK_BYTES`."""

SCHEMAS_PER_VALUE = Bound(16, "schemas that hold for one value", "write allOf, $ref and anyOf out")
"""By `allOf`, by `$ref`, and by the one of `anyOf` or `oneOf` that has most."""

PATTERNS_PER_VALUE = Bound(4, "patterns and formats for one value", "make them one pattern")
"""Their product is one automaton."""

MULTIPLES_PER_VALUE = Bound(1, "multipleOf for one value", "give their least common multiple")

MAX_MULTIPLE_OF = 10_000
"""The largest `multipleOf`: an automaton has a state for each remainder."""

PATTERN_PROPERTIES = Bound(32, "names", "make them one pattern")
"""Of `patternProperties`: every two are compared."""

OPTIONAL_PROPERTIES = Bound(
    128, "properties that may be left out", "make some required, or leave them out"
)
"""Of one object: after each, all later ones may follow."""

PROPERTY_SETS = Bound(
    128,
    "combinations of optional properties",
    "make some properties required, or drop the keyword",
)
"""Combinations that `minProperties` and `maxProperties` allow: each is a case of the grammar."""

SUBSCHEMAS_PER_KEYWORD = Bound(256, "cases", "leave some out")
"""Of `anyOf`, `oneOf`, `allOf`; every two of `oneOf` are compared."""

ENUM_VALUES = Bound(2048, "values", "leave some out")
"""In an `enum` or a `const`, those within values too."""

MAX_NUMBER = 2**53
"""The largest magnitude of a number in a schema: beyond it llguidance rounds."""

GRAMMAR_RULES = Bound(4096, "rules", "leave some out")
"""Of a grammar. llguidance goes down a chain of rules by recursion, with some 3 KiB of stack."""

QUANTIFIERS = Bound(500, "repetitions", "write fewer of ?, *, + and {}")
"""Written in one regular expression."""

GROUP_DEPTH = Bound(100, "groups around a group", "nest fewer")
"""In a regular expression, or in a grammar's rule."""

NESTED_REPETITIONS = Bound(10_000, "repetitions within repetitions", "lower the numbers in {}")
"""The largest product of nested counts in a regular expression, or in a grammar."""

STACK_BYTES = 64 * 2**20
"""Bytes of stack of the threads that compile."""

TRIAL_STACK_BYTES = STACK_BYTES // 2
"""Of the threads that try a form for a server: what passes there passes in the engine."""

TRIAL_CPU_S = 3.0
"""Of a processor's time, to try a form for a server."""

TRIAL_MEMORY_BYTES = 256 * 2**20
"""Bytes, to try a form for a server."""

TRIAL_TOKENS = 24
"""Tokens of a random answer with which a form is tried for a server."""

LLGUIDANCE_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,  # some 4 ms
    "step_max_items": 5_000,  # less than 1 ms
    "max_items_in_row": 600,  # an ambiguous grammar's time a token is quadratic in it: some 6 ms
    "max_lexer_states": 32_768,  # of some 560 bytes; `grammar.Matcher` replaces a full lexer
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's own, for compiling and for each token."""

MAX_GRAMMAR_LEXERS = 64
"""Of one grammar, each compiled anew: more answers at a time share them."""

MAX_TOTAL_LEXERS = 512
"""Of all grammars, of 0.1 to 0.3 MiB for usual schemas: of more, spare ones are dropped."""

MAX_LEXER_BYTES = 512 * 2**20
"""Bytes of all lexers. Beyond them spare lexers are dropped, new answers share lexers, and running
answers replace theirs by smaller ones."""

LEXER_IDLE_S = 30.0
"""Seconds without an answer after which all lexers are released."""

CHEAP_COMPILE_S = 0.02
"""Of a processor's time, to compile a grammar: one that takes longer has a single lexer."""

MAX_SHARED_TOKENS = 32_768
"""Tokens of finished answers after which a grammar's only lexer is replaced for new answers."""

MAX_MEAN_MASK_S = 0.02
"""CPU time that each mask of an answer may take, on average."""

MAX_MASK_EXCESS_S = 0.1
"""CPU time by which an answer's masks may together exceed that average before the answer fails."""
