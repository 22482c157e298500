"""Predicates: select the hits of a subscription by their arguments and their process.

text ──parse──► Expression ──program.compile_for(site)──► Program: tests with forward jumps
                                                           ├─ the BPF engine runs it in the kernel
                                                           └─ columns.evaluate runs it on columns, for ftrace
"""
