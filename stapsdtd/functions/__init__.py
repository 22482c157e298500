"""Kernel functions: which there are, what their arguments are and where, and why one cannot be attached to.

    "vfs_read(file->f_pos, return)" ──selectors──► FunctionSelector
    FunctionSelector ──lookup (kallsyms, BTF, ftrace)──► KernelFunction: passing, values, attaching

`lookup` asks the kernel, through the adapters of `kernel.py`; all else is pure. Offsets come from here alone: a client
names functions and values, and never says where they are.
"""
