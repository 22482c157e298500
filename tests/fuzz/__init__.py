"""Hostile ELF files, and what has to hold of anything that `parse_object` answers.

mutations    real and built objects, changed at random
adversarial  objects built to hurt
checks       parse ──► invariants ──► protobuf, the bpf engine's operands, definitions for tracefs
"""
