"""Expressions: filters, keys and values, of a hit's arguments and of its process.

text ──parse──► Condition ──SiteFilter.of(site)─┬─► tested: compile_for ► tests, calculations, forward jumps
                                                │     ├─ the BPF engine runs them in the kernel
                                                │     └─ columns.evaluate runs them on columns, for ftrace
                                                └─► evaluated: evaluate.accepted, on columns of captures, in the daemon
text ──parse_value──► Expression ──sources─┬─► Capture, HitField: the engine adds up by it
                                           └─► ExpressionSource ──needs──► captures ──evaluate──► a column
"""
