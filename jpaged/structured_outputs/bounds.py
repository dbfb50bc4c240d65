"""Limits on structured-output specifications and on the cost of grammars, in one table.

docs/structured_output.md describes the limits for users.
"""

from typing import NamedTuple

from jpaged.errors import ErrorKind, RequestError


class Bound(NamedTuple):
    """Maximum number of items, such as choices, and words for the error about too many items.

    Attributes:
        limit: Maximum number of items.
        noun: Name of the items in the error, such as "choices".
        remedy: Advice in the error, such as "remove some".
    """

    limit: int
    noun: str
    remedy: str

    def check(self, path: str, number: int) -> None:
        """Raise ValueError for the field `path` if `number` exceeds the limit."""
        if number > self.limit:
            raise RequestError(
                path,
                f"has {number} {self.noun}",
                remedy=f"at most {self.limit} are allowed; {self.remedy}",
                kind=ErrorKind.TOO_LARGE,
            )


SOURCE_LENGTH = Bound(64 * 1024, "characters", "shorten it")
"""Maximum number of characters of a schema's JSON, a regular expression, a grammar, or all choices
together."""

CHOICES = Bound(1024, "choices", "remove some")

SCHEMA_DEPTH = Bound(32, "enclosing schemas", "move nested schemas to $defs")
"""Maximum nesting depth of schemas. A `$ref` adds no depth; `SCHEMAS` limits the use of `$ref`."""

SCHEMAS = Bound(2048, "schemas", "use a smaller schema")
"""Maximum number of schemas in a specification, and so the maximum length of a chain of `$ref`.

llguidance follows the chain recursively and needs about 3.5 KiB of stack per schema. Threads that
compile grammars have a stack of `STACK_BYTES`."""

SCHEMAS_PER_VALUE = Bound(
    16, "schemas that apply to one value", "merge the schemas of allOf, $ref and anyOf"
)
"""Maximum number of schemas that one JSON value must match.

All schemas of `allOf` and `$ref` count. In each `anyOf` or `oneOf`, only the largest case counts.
"""

PATTERNS_PER_VALUE = Bound(4, "patterns and formats for one value", "combine them into one pattern")
"""Maximum number of `pattern` and `format` keywords that apply to one JSON value.

A single automaton checks all these keywords."""

MULTIPLES_PER_VALUE = Bound(1, "multipleOf for one value", "use their least common multiple")

MAX_MULTIPLE_OF = 10_000
"""Maximum value of `multipleOf`. The automaton for this keyword has one state per remainder."""

PATTERN_PROPERTIES = Bound(32, "names", "combine names into one pattern")
"""Maximum number of names in `patternProperties`. Every pair of names is compared."""

OPTIONAL_PROPERTIES = Bound(128, "optional properties", "make some required, or remove some")
"""Maximum number of optional properties of one object.

In the grammar that is compiled from a schema, every later property may follow each optional
property."""

PROPERTY_SETS = Bound(
    128,
    "combinations of optional properties",
    "make some properties required, or drop the keyword",
)
"""Maximum number of sets of optional properties that `minProperties` and `maxProperties` allow.

The schema that llguidance compiles has one `anyOf` case per set."""

SUBSCHEMAS_PER_KEYWORD = Bound(256, "cases", "remove some")
"""Maximum number of schemas in `anyOf`, `oneOf` or `allOf`. All pairs in a `oneOf` are compared."""

ENUM_VALUES = Bound(2048, "values", "remove some")
"""Maximum number of values in an `enum` or a `const`, including nested values."""

MAX_NUMBER = 2**53
"""Maximum magnitude of a number in a schema: llguidance rounds larger numbers."""

GRAMMAR_RULES = Bound(4096, "rules", "remove some")
"""Maximum number of rules in a grammar.

llguidance follows a chain of rules that refer to each other recursively, and needs about 3 KiB of
stack per rule."""

QUANTIFIERS = Bound(500, "repetitions", "use fewer of ?, *, + and {}")
"""Maximum number of quantifiers (`?`, `*`, `+`, `{}`) in one regular expression."""

GROUP_DEPTH = Bound(100, "levels of nested groups", "nest fewer groups")
"""Maximum nesting depth of groups in a regular expression or a grammar."""

NESTED_REPETITIONS = Bound(
    10_000, "repetitions within repetitions", "lower the counts in {}: nested counts multiply"
)
"""Maximum product of nested repetition counts in a regular expression or a grammar."""

STACK_BYTES = 64 * 2**20
"""Stack size of the threads that compile grammars, in bytes."""

TRIAL_STACK_BYTES = STACK_BYTES // 2
"""Stack size of the threads that run a `GrammarTrial`, in bytes.

A `GrammarTrial` compiles each new grammar in a separate process first. Other threads that compile
grammars have the larger stack `STACK_BYTES`, so a grammar that passes the trial compiles there."""

TRIAL_CPU_S = 3.0
"""Maximum CPU time of one `GrammarTrial` (a test compilation in a separate process), in seconds."""

TRIAL_MEMORY_BYTES = 256 * 2**20
"""Maximum memory of one `GrammarTrial` (a test compilation in a separate process), in bytes."""

TRIAL_TOKENS = 24
"""Maximum number of random tokens that a `GrammarTrial` (a test compilation) generates."""

LLGUIDANCE_LIMITS = {
    "initial_lexer_fuel": 500_000,
    # Fuel is llguidance's unit of lexer work. 50,000 units last about 4 ms of CPU time.
    "step_lexer_fuel": 50_000,
    # Maximum number of Earley parser items per mask. 5,000 items take less than 1 ms.
    "step_max_items": 5_000,
    # Maximum number of Earley parser items at one position of the text. With 600 items, a token
    # takes about 6 ms. The time is quadratic in the number of items.
    "max_items_in_row": 600,
    # Maximum number of states of a lexer; a state takes about 560 bytes. `Matcher` replaces a lexer
    # that reaches this limit.
    "max_lexer_states": 32_768,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits that llguidance enforces while it compiles a grammar and matches each token."""

MAX_GRAMMAR_LEXERS = 64
"""Maximum number of lexers (compiled copies) of one grammar.

If more answers are generated at the same time, several answers share a lexer."""

MAX_TOTAL_LEXERS = 512
"""Maximum number of lexers of all grammars. A lexer is a compiled copy of a grammar.

If there are more lexers, unused lexers are dropped.

A lexer of a usual schema takes 0.1 to 0.3 MiB."""

MAX_LEXER_BYTES = 512 * 2**20
"""Maximum memory of all lexers, in bytes.

A lexer is a compiled copy of a grammar, and grows while an answer uses it. If the lexers take more
memory, unused lexers are dropped, new answers share lexers, and unfinished answers get smaller
lexers."""

LEXER_IDLE_S = 30.0
"""Seconds after which all lexers (compiled grammars) are released if no answer uses a grammar."""

CHEAP_COMPILE_S = 0.02
"""A grammar that takes at least this many CPU seconds to compile has only one lexer.

A lexer is a compiled copy of the grammar. All answers share the only lexer."""

MAX_SHARED_TOKENS = 32_768
"""Number of tokens of finished answers after which a grammar's only lexer is replaced.

A lexer is a compiled copy of a grammar. Unfinished answers keep the old lexer."""

MAX_MEAN_MASK_S = 0.02
"""Maximum average CPU time per token mask of an answer, in seconds."""

MAX_MASK_EXCESS_S = 0.1
"""Maximum sum of (CPU seconds of a token mask - `MAX_MEAN_MASK_S`) over the masks of an answer.

A negative sum is set to 0. An answer with a larger sum fails."""
