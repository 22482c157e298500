"""Spans: pairs of a start and the end that belongs to it, and the time between them."""
