"""Aggregations: what hits have in common, instead of the hits.

Aggregation   what a client asks for: functions of a value, by a tuple of keys
group()       EventBatch ──► a Row for each key
Table         keeps the rows until a client takes them

keys                   │ Row
("SELECT …", "app")    │ count 17, total 812, low 3, high 120, buckets {5: 12, 7: 5}
"""
