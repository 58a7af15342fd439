"""Rule packs as people write them: YAML with file and line, read, merged, checked; and tests of rules in the same language.

In: files. Out: `Pack`, or problems that name file, line, what was expected, what came, and the nearest known word.
Never: sees a step.
"""
