"""What comes out: events in columns, one format from the ring to the wire."""
