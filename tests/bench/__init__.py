"""Benchmarks: `./dev bench`. Each figure is a median of alternating runs; hold on to ratios, not to milliseconds."""
