"""Predicates: which hits a subscription wants, by their arguments and by the process they are of.

text ──parse──► Expression ──program.compile_for(site)──► Program: tests with forward jumps
                                                           ├─ the BPF engine runs it in the kernel
                                                           └─ columns.evaluate runs it over blocks, for ftrace
"""
