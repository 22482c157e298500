"""Objects of BPF programs that are apart from the engine's; bpf/build.py compiles them."""
