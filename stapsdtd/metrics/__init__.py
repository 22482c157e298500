"""What the daemon does, as figures for Prometheus. Nothing here runs but when somebody asks.

Sources ──► StapsdtdCollector ──► prometheus_client ──► Exporter, a thread of its own ──► GET /metrics
"""
