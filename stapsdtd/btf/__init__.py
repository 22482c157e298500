"""Types of C as BTF describes them (Documentation/bpf/btf.rst): what they are, how they print, what lies where. Pure.

records of a BTF ──records.decode──► CType, by TypeId ──┬─ declare ──► "struct file *file"
                                                        └─ members ──► member: type, offset, bits
"""
